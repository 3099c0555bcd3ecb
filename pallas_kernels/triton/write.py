"""Writing K and V into pages, in place, in the Triton backend of Pallas.

Shapes: T rows, P pages, Z positions per page, H query heads, K KV heads, D head_dim, N = H + 2 K.

``rotate_and_write`` takes the projected heads as they leave the product ``[T, N, D]`` (queries, keys, values), rotates
queries and keys, and puts keys and values where they belong: one kernel and one pass in the place of three.
``write_kv_quantized`` is ``quantized.write_kv_quantized`` with one program per (row, KV head); the first row of a page
does the work of all its rows, so nobody waits for anybody.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int, Num

from ..quantized import LARGEST, SMALLEST, inverse, scale_for
from ..shapes import QUANTIZED, AttentionShape
from .common import power_of_two

MAX_ELEMENTS = 2**31 - 1  # of one array of pages: offsets have 32 bits


@dataclasses.dataclass(frozen=True)
class WriteConfig:
    """Sizes of ``rotate_and_write``; they do not change what is computed. Untuned."""

    heads: int = 8  # of N per program, a power of two
    num_warps: int = 2


def write_refusal(shape: AttentionShape) -> str | None:
    """Why the kernels here cannot write into pages of this shape, or None."""
    elements = shape.num_pages * shape.page_size * shape.kv_heads * shape.head_dim
    if elements > MAX_ELEMENTS:
        return f"pages of {elements} elements are above {MAX_ELEMENTS}, which 32-bit offsets reach"
    if shape.kv_dtype == "float8_e4m3fn" and shape.family in ("sm_80", "sm_86"):
        return f"{shape.family} has no conversion to float8_e4m3fn; it needs sm_89 or newer"
    return None


def rotate_refusal(shape: AttentionShape) -> str | None:
    """Why ``rotate_and_write`` cannot do it, or None."""
    if shape.kv_dtype in QUANTIZED:
        return f"pages of {shape.kv_dtype} need scales: rotate first, then write_kv_quantized"
    if shape.head_dim % 2:
        return f"head_dim {shape.head_dim} is odd; halves are rotated"
    return write_refusal(shape)


# -- plain pages -------------------------------------------------------------------------------------------------------


def _rotate_kernel(static: tuple[int, int, int, int, int], *refs: Any) -> None:
    heads_ref, cos_ref, sin_ref, page_ref, offset_ref, _k, _v, q_ref, k_ref, v_ref = refs
    heads, kv_heads, half, num_pages, block = static
    row, width = pl.program_id(0), power_of_two(half)
    head = pl.program_id(1) * block + jnp.arange(block)[:, None]
    at = jnp.arange(width)[None, :]
    live = (head < heads + 2 * kv_heads) & (at < half)
    left = plt.load(heads_ref.at[row, head, at], mask=live, other=0)
    right = plt.load(heads_ref.at[row, head, at + half], mask=live, other=0)
    cos = plt.load(cos_ref.at[row, at], mask=at < half, other=0)
    sin = plt.load(sin_ref.at[row, at], mask=at < half, other=0)
    wide_left, wide_right = left.astype(jnp.float32), right.astype(jnp.float32)
    turned_left = (wide_left * cos - wide_right * sin).astype(left.dtype)
    turned_right = (wide_right * cos + wide_left * sin).astype(left.dtype)

    # Lanes that are masked off point behind the array: the interpreter writes them all the same, and drops them there.
    mine = live & (head < heads)
    where = jnp.where(mine, head, heads)
    plt.store(q_ref.at[row, where, at], turned_left, mask=mine)
    plt.store(q_ref.at[row, where, at + half], turned_right, mask=mine)

    page, offset = plt.load(page_ref.at[row]), plt.load(offset_ref.at[row])
    known = page < num_pages
    target = jnp.where(known, page, 0)
    mine = live & known & (head >= heads) & (head < heads + kv_heads)
    where = jnp.where(mine, head - heads, kv_heads)
    plt.store(k_ref.at[target, offset, where, at], turned_left.astype(k_ref.dtype), mask=mine)
    plt.store(k_ref.at[target, offset, where, at + half], turned_right.astype(k_ref.dtype), mask=mine)
    mine = live & known & (head >= heads + kv_heads)
    where = jnp.where(mine, head - heads - kv_heads, kv_heads)
    plt.store(v_ref.at[target, offset, where, at], left.astype(v_ref.dtype), mask=mine)
    plt.store(v_ref.at[target, offset, where, at + half], right.astype(v_ref.dtype), mask=mine)


def rotate_and_write(
    heads: Float[Array, "T N D"],
    cos: Float[Array, "T 1 F"],
    sin: Float[Array, "T 1 F"],
    k_pages: Float[Array, "P Z K D"],
    v_pages: Float[Array, "P Z K D"],
    page: Int[Array, "T"],
    offset: Int[Array, "T"],
    *,
    config: WriteConfig | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "T H D"], Float[Array, "P Z K D"], Float[Array, "P Z K D"]]:
    """Rotated queries, and the pages with rotated keys and values written at ``(page, offset)``; page >= P: dropped.

    ``heads`` holds H = N - 2 K queries, then K keys, then K values of each row. ``cos`` and ``sin`` are float32 with
    F = D/2; the two halves of a head are rotated, in float32, as ``rotary.rotate`` does. Pages are aliased: in
    place where they are donated or carried by a scan. Bytes moved: ``heads`` once in, once out.
    """
    rows, total, dim = heads.shape
    num_pages, _, kv_heads, _ = k_pages.shape
    config = config or WriteConfig()
    half, queries = dim // 2, total - 2 * kv_heads
    block = min(config.heads, power_of_two(total))
    out = pl.pallas_call(
        functools.partial(_rotate_kernel, (queries, kv_heads, half, num_pages, block)),
        grid=(rows, -(-total // block)),
        out_shape=[
            jax.ShapeDtypeStruct((rows, queries, dim), heads.dtype),
            jax.ShapeDtypeStruct(k_pages.shape, k_pages.dtype),
            jax.ShapeDtypeStruct(v_pages.shape, v_pages.dtype),
        ],
        input_output_aliases={5: 1, 6: 2},
        compiler_params=plt.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
        name="rotate_and_write",
    )(heads, cos.reshape(rows, half), sin.reshape(rows, half), page, offset, k_pages, v_pages)
    return out[0], out[1], out[2]


# -- quantised pages ---------------------------------------------------------------------------------------------------


def _encode(x: Array, kv_dtype: str) -> Array:
    largest = LARGEST[kv_dtype]
    x = jnp.minimum(jnp.maximum(jnp.where(x == x, x, 0.0), -largest), largest)
    if kv_dtype != "int8":
        return x.astype(kv_dtype)
    # Half to even by integers: there is no round here, and to add and take away a large number may be simplified.
    size = jnp.abs(x)
    whole = size.astype(jnp.int32)
    rest = size - whole.astype(jnp.float32)
    more = (rest > 0.5) | ((rest == 0.5) & ((whole & 1) == 1))
    whole += more.astype(jnp.int32)
    return jnp.where(x < 0, -whole, whole).astype(kv_dtype)


def _quantize_kernel(static: tuple[int, int, int, str], *refs: Any) -> None:
    rows_ref, page_ref, offset_ref, *_old, pages_ref, scales_ref = refs
    count, num_pages, dim, kv_dtype = static
    row, head = pl.program_id(0), pl.program_id(1)
    page, offset = plt.load(page_ref.at[row]), plt.load(offset_ref.at[row])
    before = plt.load(page_ref.at[jnp.maximum(row - 1, 0)])
    leads = (page < num_pages) & ((row == 0) | (before != page))
    lane = jnp.arange(power_of_two(dim))

    def same(at: Array) -> Array:
        return (at < count) & (plt.load(page_ref.at[jnp.minimum(at, count - 1)]) == page)

    def values(at: Array) -> Array:
        return plt.load(rows_ref.at[at, head, lane], mask=lane < dim, other=0).astype(jnp.float32)

    @pl.when(leads)
    def write() -> None:
        def widest(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            at, most = carry
            absolute = jnp.abs(values(at))
            return at + 1, jnp.maximum(most, jnp.where(absolute < jnp.inf, absolute, 0.0))

        start = (row, jnp.zeros(lane.shape, jnp.float32))
        end, most = lax.while_loop(lambda carry: same(carry[0]), widest, start)
        kept = plt.load(scales_ref.at[page, head])
        old = jnp.where(offset == 0, SMALLEST, jnp.maximum(kept, SMALLEST))
        new = jnp.maximum(old, scale_for(jnp.max(most), kv_dtype))
        ratio = old * inverse(new)

        @pl.when((offset > 0) & (new > old))
        def grow() -> None:
            def requantize(at: Array, carry: Array) -> Array:
                where = jnp.where(lane < dim, lane, dim)
                spot = pages_ref.at[page, at, head, where]
                stored = plt.load(spot, mask=lane < dim).astype(jnp.float32)
                plt.store(spot, _encode(stored * ratio, kv_dtype), mask=lane < dim)
                return carry

            lax.fori_loop(0, offset, requantize, 0)

        def put(at: Array, carry: Array) -> Array:
            spot = pages_ref.at[page, plt.load(offset_ref.at[at]), head, jnp.where(lane < dim, lane, dim)]
            plt.store(spot, _encode(values(at) * inverse(new), kv_dtype), mask=lane < dim)
            return carry

        lax.fori_loop(row, end, put, 0)
        plt.store(scales_ref.at[page, head], new)


def write_kv_quantized(
    pages: Num[Array, "P Z K D"],
    scales: Float[Array, "P K"],
    rows: Float[Array, "T K D"],
    page: Int[Array, "T"],
    offset: Int[Array, "T"],
    *,
    interpret: bool = False,
) -> tuple[Num[Array, "P Z K D"], Float[Array, "P K"]]:
    """As ``quantized.write_kv_quantized``, bit for bit in what has been written; pages and scales are aliased."""
    count, kv_heads, dim = rows.shape
    kv_dtype = jnp.dtype(pages.dtype).name
    static = (count, pages.shape[0], dim, kv_dtype)
    out = pl.pallas_call(
        functools.partial(_quantize_kernel, static),
        grid=(count, kv_heads),
        out_shape=[
            jax.ShapeDtypeStruct(pages.shape, pages.dtype),
            jax.ShapeDtypeStruct(scales.shape, scales.dtype),
        ],
        input_output_aliases={3: 0, 4: 1},
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="write_kv_quantized",
    )(rows, page, offset, pages, scales)
    return out[0], out[1]
