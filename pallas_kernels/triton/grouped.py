"""Grouped product in the Triton backend of Pallas: one program per tile of rows and block of output columns.

Tiles without rows leave at once, so that a matrix is read once for each of its group's tiles, and not at all if the
group has no rows. Shapes as in ``grouped``.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from ..grouped import Tiles
from ..products import Stored
from ..tuning import CARDS
from . import products
from .common import FLOATS, power_of_two

SMALLEST_TILE = 16  # rows of a matrix product in Triton
COLUMNS, DEPTH = 128, 64  # of a program's block of the matrix; untuned


def refusal(x: Any, kernel: Any, family: str | None) -> str | None:
    """Why this kernel cannot do ``x [R,I]`` times ``kernel [N,I,O]``, an array or stored quantised, or None."""
    if isinstance(kernel, Stored):
        return products.refusal(x, kernel, family)
    if jnp.dtype(x.dtype).name not in FLOATS or x.dtype != kernel.dtype:
        return f"rows are {x.dtype} and matrices {kernel.dtype}; known: both alike, {', '.join(FLOATS)}"
    if kernel.size >= 2**31:
        return f"matrices of {kernel.size} elements are above 2**31, where Triton's 32-bit offsets overflow"
    if family is not None and family not in CARDS:
        return f"GPU family {family} is not among {', '.join(CARDS)}"
    return None


def _kernel(static: tuple[int, ...], *refs: Any) -> None:
    x_ref, kernel_ref, group_ref, row_ref, rows_ref, out_ref = refs
    width, wide, tile, columns, depth = static
    t, block = pl.program_id(0), pl.program_id(1)
    rows = plt.load(rows_ref.at[t])

    @pl.when(rows > 0)
    def _() -> None:
        group, first = plt.load(group_ref.at[t]), plt.load(row_ref.at[t])
        lane = jnp.arange(tile)
        mine, row = (lane < rows)[:, None], (first + lane)[:, None]
        column = (block * columns + jnp.arange(columns))[None, :]
        inside = column < wide

        def add(i: Array, total: Array) -> Array:
            k = i * depth + jnp.arange(depth)
            x = plt.load(x_ref.at[row, k[None, :]], mask=mine & (k < width)[None, :], other=0.0)
            matrix_mask = (k < width)[:, None] & inside
            matrix = plt.load(kernel_ref.at[group, k[:, None], column], mask=matrix_mask, other=0.0)
            exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
            return total + jnp.dot(x, matrix, precision=exact, preferred_element_type=jnp.float32)

        total = lax.fori_loop(0, -(-width // depth), add, jnp.zeros((tile, columns), jnp.float32))
        plt.store(out_ref.at[row, column], total.astype(out_ref.dtype), mask=mine & inside)


def _quantized_kernel(s: products.Block, tile: int, columns: int, *refs: Any) -> None:
    x_ref, *stored_refs, group_ref, row_ref, rows_ref, out_ref = refs
    t, first = pl.program_id(0), pl.program_id(1) * columns
    rows = plt.load(rows_ref.at[t])

    @pl.when(rows > 0)
    def _() -> None:
        group, lane = plt.load(group_ref.at[t]), jnp.arange(tile)
        row, column = plt.load(row_ref.at[t]) + lane, first + jnp.arange(columns)
        sums = products.block_product(s, (x_ref, *stored_refs), (group,), row, lane < rows, column)
        products.store_block(s, out_ref, (), row, lane < rows, s.halves * first, sums)


def _on_quantized(x: Array, stored: Stored, tiles: Tiles, tile: int, interpret: bool) -> Array:
    s = products.block_of(stored)
    columns = min(64, max(products.SMALLEST, power_of_two(s.row_bytes)))
    return pl.pallas_call(
        functools.partial(_quantized_kernel, s, tile, columns),
        grid=(tiles.row.shape[0], -(-s.row_bytes // columns)),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], s.halves * s.row_bytes), x.dtype),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="grouped_matmul",
    )(x, *products.in_bytes(stored), tiles.group, tiles.row, tiles.rows)


def grouped_matmul(
    x: Float[Array, "R I"],
    kernel: Float[Array, "N I O"] | Stored,
    tiles: Tiles,
    tile: int,
    *,
    interpret: bool = False,
) -> Float[Array, "R O"]:
    """The product of each tile's rows with its group's matrix. Rows of no tile are left as they happen to be."""
    if isinstance(kernel, Stored):
        return _on_quantized(x, kernel, tiles, tile, interpret)
    (rows, width), wide = x.shape, kernel.shape[2]
    columns, depth = min(COLUMNS, max(16, power_of_two(wide))), min(DEPTH, max(16, power_of_two(width)))
    if x.dtype == jnp.float32:
        columns, depth = min(columns, 64), min(depth, 32)
    return pl.pallas_call(
        functools.partial(_kernel, (width, wide, tile, columns, depth)),
        grid=(tiles.row.shape[0], -(-wide // columns)),
        out_shape=jax.ShapeDtypeStruct((rows, wide), x.dtype),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="grouped_matmul",
    )(x, kernel, tiles.group, tiles.row, tiles.rows)
