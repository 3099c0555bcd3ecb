"""What both Mosaic GPU attention kernels share: refusals, shared-memory tiles, page copies, one softmax step.

A tile is ``block`` positions of one KV head of one slot. It is copied from the pages in *units*: a whole page, or
``block`` rows of a page where a page is larger than a tile. Each unit is one TMA copy, found through the block table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..shapes import AttentionOptions, AttentionShape

Array = jax.Array
LOG2_E = math.log2(math.e)
ROWS = 64  # rows of a wgmma tile: query rows times the query heads that share a KV head
WIDTH = (
    128  # columns of one product with V: a wider head is done in parts, so that its sums fit the registers
)
FLOOR = (
    -1e30
)  # running maximum of a row that has seen no position: finite, so exp2(FLOOR - FLOOR) is 1, not NaN
SHARED_BYTES = 227 * 1024  # shared memory of a block on sm_90
RESERVED_BYTES = 6 * 1024  # of which: barriers, scratch for reductions, alignment
RESULT_BYTES = 16 * 1024  # of which: results on their way out, in parts
FAMILIES = (None, "sm_90")
OLDEST_JAX = (0, 11, 0)  # plgpu.kernel(out_type=...) and its interpreter


def refusal(shape: AttentionShape) -> str | None:
    """Why neither kernel here can do ``shape``, or None."""
    if shape.family not in FAMILIES:
        return f"Mosaic GPU kernels are written for sm_90 (TMA, wgmma), this is {shape.family}"
    if jax.__version_info__ < OLDEST_JAX:
        return f"Mosaic GPU kernels need jax 0.11 or newer, this is {jax.__version__}"
    if shape.dtype not in ("bfloat16", "float16"):
        return f"Mosaic GPU kernels take bfloat16 and float16 queries, not {shape.dtype}"
    if shape.kv_dtype != shape.dtype:
        return f"Mosaic GPU kernels need pages of the queries' dtype {shape.dtype}, not {shape.kv_dtype}"
    if shape.head_dim not in (64, 128, 256):
        return f"Mosaic GPU kernels take head_dim 64, 128 or 256, not {shape.head_dim}"
    if shape.group > ROWS:
        return f"{shape.group} query heads share a KV head, a tile has {ROWS} rows"
    if shape.page_size % 8:
        return f"page_size {shape.page_size} is not a multiple of 8 rows, the height of a shared-memory tile"
    return None


def block_refusal(shape: AttentionShape, block: int) -> str | None:
    """Why tiles of ``block`` positions do not fit pages of this size, or None."""
    if block % shape.page_size and shape.page_size % block:
        return f"page_size {shape.page_size} and a tile of {block} positions do not divide each other"
    return None


def interpreter(interpret: Any) -> Any:
    """The ``interpret`` argument of a kernel: False, or parameters of the Mosaic GPU interpreter."""
    if interpret is True:
        return plgpu.InterpretGPUParams()
    return interpret or False


def compiler_params() -> plgpu.CompilerParams:
    """exp2 as one instruction; layouts are inferred per warpgroup."""
    return plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup)


def tile_smem(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory of tiles ``[..., rows, columns]`` laid out as wgmma reads them."""
    swizzle = plgpu.find_swizzle(shape[-1] * jnp.dtype(dtype).itemsize * 8)
    transforms: Any = plgpu  # their base class looks abstract to a type checker
    tiling = transforms.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, transforms.SwizzleTransform(swizzle)))


def padded(group: int) -> int:
    """Rows of a group in shared memory: whole tiles of 8."""
    return -(-group // 8) * 8


def pad_group(q: Array) -> Array:
    """``[..., G, D]`` with zero heads behind the group: a copy must begin and end at a tile of 8 rows."""
    extra = padded(q.shape[-2]) - q.shape[-2]
    return jnp.pad(q, [(0, 0)] * (q.ndim - 2) + [(0, extra), (0, 0)]) if extra else q


def unit_rows(page_size: int, block: int) -> int:
    """Rows of one copy from the pages into a tile."""
    return min(page_size, block)


def load_tile(
    pages: Any,
    table: Any,
    slot: Array,
    head: Array,
    start: Array,
    lo: Array,
    hi: Array,
    tile: Any,
    ready: Any,
    **sizes: int,
) -> None:
    """Start the copies of the positions ``start ..`` of a slot into ``tile`` [block, D]; not those outside lo..hi.

    ``pages`` [P*Z, K*D], ``table`` [S, W]. ``ready`` counts one arrival per unit, loaded or not, so that its number
    does not depend on the length. A block-table entry is read only for a unit with a position in ``lo .. hi - 1``.
    """
    size, dim = sizes["page_size"], sizes["head_dim"]
    rows = unit_rows(size, tile.shape[0])
    for unit in range(tile.shape[0] // rows):
        first = start + unit * rows
        wanted = (first < hi) & (first + rows > lo)

        @pl.when(wanted)
        def _load(first: Array = first, unit: int = unit) -> None:
            row = table[slot, lax.div(first, jnp.int32(size))] * size + lax.rem(first, jnp.int32(size))
            source = pages.at[pl.ds(row, rows), pl.ds(head * dim, dim)]
            plgpu.copy_gmem_to_smem(source, tile.at[pl.ds(unit * rows, rows)], ready)

        @pl.when(jnp.logical_not(wanted))
        def _skip() -> None:
            plgpu.barrier_arrive(ready)


def product(a: Any, b: Any) -> Array:
    """``a [64, J] @ b [J, N]`` in float32 by wgmma; ``b`` in shared memory, ``a`` there or in registers."""

    def multiply(acc: Any) -> Array:
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def add_product(sums: Array, a: Array, b: Any, *, interpreted: bool) -> Array:
    """``sums + a @ b`` with ``sums`` and ``a`` in registers, by wgmma in place.

    The interpreter knows neither accumulators with a start value nor operands in registers: there, plain arithmetic.
    """
    if interpreted:
        return sums + jnp.dot(
            a.astype(jnp.float32), b[...].astype(jnp.float32), precision=lax.Precision.HIGHEST
        )
    return pl.run_state(lambda acc: plgpu.wgmma(acc, a, b))(plgpu.ACC.init(sums))


def scores_log2(products: Array, options: AttentionOptions) -> Array:
    """Scores times log2(e), so that exp2 gives their exponential. tanh is written out: the fast one has 11 bits."""
    if options.soft_cap is None:
        return products * (options.scale * LOG2_E)
    power = jnp.exp2(products * (2.0 * LOG2_E * options.scale / options.soft_cap))
    return (options.soft_cap * LOG2_E) * (1.0 - 2.0 / (1.0 + power))


def softmax_step(scores: Array, top: Array, total: Array) -> tuple[Array, Array, Array, Array]:
    """One step of the streaming softmax: probabilities, factor for the sums so far, new maximum, new total."""
    new_top = jnp.maximum(top, scores.max(axis=1))
    factor = jnp.exp2(top - new_top)
    probabilities = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [0]))
    return probabilities, factor, new_top, total * factor + probabilities.sum(axis=1)


def zero_rows(tile: Any, start: Array, lo: Array, hi: Array) -> None:
    """Write zeros over the rows of ``tile`` whose position is outside ``lo .. hi - 1``: 0 times a NaN is a NaN."""
    width = sum_width(tile.shape[1])
    for row in range(0, tile.shape[0], ROWS):
        position = plgpu.broadcasted_iota(jnp.int32, (ROWS, width), 0, layout=plgpu.Layout.WGMMA) + (
            start + row
        )
        for column in range(0, tile.shape[1], width):
            part = tile.at[pl.ds(row, ROWS), pl.ds(column, width)]
            part[...] = jnp.where((position >= lo) & (position < hi), part[...], jnp.zeros((), tile.dtype))
    plgpu.commit_smem()


def row_values(value: float) -> Array:
    """``[64]`` float32, one value per row of a tile."""
    return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))


def sum_width(head_dim: int) -> int:
    """Columns of one product with V. A head of 256 is done in four parts, so that its sums fit the registers."""
    return head_dim if head_dim <= 128 else 64


def empty_sums(head_dim: int) -> tuple[Array, ...]:
    """Zero sums ``[64, D]``, in parts of ``sum_width`` columns."""
    shape = (ROWS, sum_width(head_dim))
    return tuple(
        plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        for _ in range(head_dim // shape[1])
    )


def weigh_values(
    probabilities: Array, values: Any, sums: tuple[Array, ...], factor: Array, *, interpreted: bool
) -> tuple[Array, ...]:
    """``sums * factor + probabilities @ values``, part by part; ``values`` [block, D] in shared memory."""
    weights = probabilities.astype(values.dtype)
    out = []
    for part, done in enumerate(sums):
        columns = pl.ds(part * done.shape[1], done.shape[1])
        scaled = done * lax.broadcast_in_dim(factor, done.shape, [0])
        out.append(add_product(scaled, weights, values.at[:, columns], interpreted=interpreted))
    return tuple(out)


def result_width(head_dim: int, dtype: Any) -> int:
    """Columns of the results that leave together, through ``RESULT_BYTES`` of shared memory."""
    return min(sum_width(head_dim), RESULT_BYTES // (ROWS * jnp.dtype(dtype).itemsize))


def result_parts(sums: tuple[Array, ...], total: Array, width: int) -> Iterator[tuple[int, Array]]:
    """First column and values ``[64, width]`` of each part of ``sums / total``; zero where nothing was seen."""
    scale = jnp.where(total > 0, 1.0 / total, 0.0)
    for part, values in enumerate(sums):
        values = values * lax.broadcast_in_dim(scale, values.shape, [0])
        for column in range(0, values.shape[1], width):
            yield part * values.shape[1] + column, values[:, column : column + width]
