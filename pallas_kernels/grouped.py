"""Grouped products: rows sorted by group, each multiplied by the matrix of its group. The experts of a routed MLP.

``lax.ragged_dot`` says the same, but neither on XLA:CPU nor on XLA:GPU is it more than a product of every row with
every group's matrix (seen in the compiled code, jax 0.12): N times the work. Here rows are cut into tiles of one group
each, and only tiles that have rows are computed: by a loop on a CPU, by a kernel on CUDA.

Shapes: R rows, N groups, I and O widths, B tiles.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from . import tuning
from .products import Stored

IMPLEMENTATIONS = ("reference", "xla", "triton")
LARGEST_TILE = 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tiles:
    """Runs of rows of one group, at most ``tile`` long."""

    group: Int[Array, "B"]
    row: Int[Array, "B"]  # first row
    rows: Int[Array, "B"]  # how many; 0 for tiles that are not needed, which come last
    count: Int[Array, ""]  # tiles that have rows


def tile_size(rows: int, groups: int) -> int:
    """Rows per tile: about as many as a group gets, so that few of a tile are empty."""
    return max(4, min(LARGEST_TILE, 1 << (max(rows // groups, 1) - 1).bit_length()))


def make_tiles(group: Int[Array, "R"], groups: int, tile: int) -> Tiles:
    """Cuts sorted rows into tiles. Rows whose group is ``groups`` or more belong to none."""
    rows = group.shape[0]
    index = jnp.arange(rows, dtype=jnp.int32)
    bound = -(-rows // tile) + min(groups, rows)
    new = jnp.concatenate((jnp.ones(1, bool), group[1:] != group[:-1]))
    begin = lax.cummax(jnp.where(new, index, 0))
    starts = (group < groups) & ((index - begin) % tile == 0)
    owner = jnp.where(group < groups, jnp.cumsum(starts, dtype=jnp.int32) - 1, bound)
    place = jnp.where(starts, owner, bound)
    zeros = jnp.zeros(bound, jnp.int32)
    return Tiles(
        zeros.at[place].set(group, mode="drop"),
        zeros.at[place].set(index, mode="drop"),
        zeros.at[owner].add(1, mode="drop"),
        jnp.sum(starts, dtype=jnp.int32),
    )


def grouped_matmul(
    x: Float[Array, "R I"],
    kernel: Float[Array, "N I O"] | Stored,
    group: Int[Array, "R"],
    *,
    implementation: str | None = None,
) -> Float[Array, "R O"]:
    """``x[r] @ kernel[group[r]]`` for rows sorted by group, summed in float32. A row's result is its own.

    Of a quantised ``kernel`` the loop computes the values of one matrix at a time, and the kernel for CUDA reads what
    is stored; where it cannot, the values of all matrices are written out first.
    Rows whose group is N or more come last and get zeros. ``implementation``: None chooses by platform; "triton" runs
    in Pallas's interpreter on a CPU. Raises ValueError for an unknown one and one that cannot do this.
    """
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(
            f"grouped_matmul: implementation {implementation!r} is unknown; "
            f"known: {', '.join(IMPLEMENTATIONS)}, or None"
        )
    if implementation == "reference":
        return _reference(x, kernel.values(x.dtype) if isinstance(kernel, Stored) else kernel, group)
    family = tuning.device_family()
    if implementation == "xla" or (implementation is None and family is None):
        return _loop(x, kernel, group)
    kernels = importlib.import_module(".triton.grouped", __package__)
    if isinstance(kernel, Stored) and kernels.refusal(x, kernel, family):
        kernel = kernel.values(x.dtype)
    reason = kernels.refusal(x, kernel, family)
    if implementation is None:
        chosen = _loop if reason else functools.partial(_on_tiles, kernels, False)
        return lax.platform_dependent(x, kernel, group, cuda=chosen, default=_loop)
    if reason is not None:
        raise ValueError(f"grouped_matmul: implementation 'triton' cannot do this: {reason}; 'xla' can")
    interpreted = functools.partial(_on_tiles, kernels, True)
    return lax.platform_dependent(
        x, kernel, group, cpu=interpreted, default=functools.partial(_on_tiles, kernels, False)
    )


def _on_tiles(kernels: Any, interpret: bool, x: Array, kernel: Any, group: Array) -> Array:
    groups = jax.tree.leaves(kernel)[0].shape[0]
    size = max(kernels.SMALLEST_TILE, tile_size(x.shape[0], groups))
    tiles = make_tiles(group, groups, size)
    out = kernels.grouped_matmul(x, kernel, tiles, size, interpret=interpret)
    return jnp.where((group < groups)[:, None], out, 0)


def _precision(x: Array) -> lax.Precision | None:
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def _reference(x: Array, kernel: Array, group: Array) -> Array:
    every = jnp.einsum("ri,nio->nro", x, kernel, precision=_precision(x), preferred_element_type=jnp.float32)
    own = jnp.arange(kernel.shape[0])[:, None] == group
    return jnp.sum(jnp.where(own[:, :, None], every, 0), axis=0).astype(x.dtype)


def _loop(x: Array, kernel: Any, group: Array) -> Array:
    """A loop over the tiles: each reads one matrix. Its trip count is dynamic, which is free on a CPU."""
    (rows, width), groups = x.shape, jax.tree.leaves(kernel)[0].shape[0]

    def matrix(i: Array | int) -> Array:
        one = jax.tree.map(lambda a: a[i], kernel)
        return one.values(x.dtype) if isinstance(one, Stored) else one

    wide = jax.eval_shape(lambda: matrix(0)).shape[1]
    tile = min(tile_size(rows, groups), rows)
    tiles = make_tiles(group, groups, tile)
    padded = jnp.pad(x, ((0, tile), (0, 0)))

    def one_tile(t: Array, out: Array) -> Array:
        part = lax.dynamic_slice(padded, (tiles.row[t], 0), (tile, width))
        new = jnp.dot(
            part, matrix(tiles.group[t]), precision=_precision(x), preferred_element_type=jnp.float32
        )
        old = lax.dynamic_slice(out, (tiles.row[t], 0), (tile, wide))
        mine = (jnp.arange(tile) < tiles.rows[t])[:, None]
        return lax.dynamic_update_slice(out, jnp.where(mine, new.astype(x.dtype), old), (tiles.row[t], 0))

    return lax.fori_loop(0, tiles.count, one_tile, jnp.zeros((rows + tile, wide), x.dtype))[:rows]
