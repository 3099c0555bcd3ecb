"""Decode attention over pages in the Triton backend of Pallas (compute capability 8.0 to 12.x).

Shapes: S slots, P pages, Z positions per page, W pages per sequence, H query heads, K KV heads, G = H / K, D head_dim.

One program per (KV head, split, slot). It walks its part of the slot's context in blocks of T positions, gathers a
block's rows of K and V through the block table, and keeps an online softmax (Milakov & Gimelshein 2018) in float32.
Blocks and pages are independent of each other: each position looks its page up. The ids of the next block are loaded
while the present block is computed, so that the K and V loads depend on nothing but registers and can be pipelined.

- With G query heads per KV head, these are the rows of one tile (padded to 16, what the matrix units take) and both
  products are dots. With few heads per KV head in float32, or one in any dtype, a dot would be mostly padding; there
  each position is multiplied and summed without matrix units.
- A context may be split among several programs (flash-decoding, Dao et al. 2023). Each split covers an equal share of
  the blocks that are live in that slot; it writes what it has unnormalised with its maximum and sum, and a second
  kernel merges. With one split there is no second kernel.
- int8 and float8_e4m3fn pages: the scale of K multiplies the scores, that of V the probabilities, so tiles are only
  cast.

HBM traffic: K and V of the live (windowed) context once, the scales beside them, and per split and head D + 2 floats.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from ..shapes import QUANTIZED, AttentionOptions, AttentionShape
from ..tuning import card
from .common import MASKED, power_of_two, refusal
from .decode_pages import MIN_BLOCKS, DecodeConfig, Pages, Static, scores_of, span

MIN_ROWS = 16  # rows of the smallest tile that the matrix units take
MAX_SPLITS = 128
MERGE_CHUNK = 16  # partial results that the merge loads at once


def default_config(shape: AttentionShape) -> DecodeConfig:
    """Sizes that compile without register spills within the family's shared memory. Untuned: by reasoning alone."""
    block, warps, stages = 64, 4, 3
    width, rows = power_of_two(shape.head_dim), max(MIN_ROWS, power_of_two(shape.group))
    floats = _multiplies_float32(shape)
    if floats:  # multiplied without matrix units: many registers per row
        block, warps = (32 if width <= 128 else 16), 8
    elif width > 128 and (shape.group == 1 or shape.kv_dtype in QUANTIZED or rows > 32):
        block = 32
    if rows > 32:
        warps = 8
    size = 4 if floats else 2
    room = card(shape.family).shared_memory - 8192  # beside queries, K and V: small tiles
    room -= rows * width * size
    width *= 4 if shape.kv_dtype == "float32" else 2
    while stages > 1 and 2 * block * width * (stages - 1) > room:
        stages -= 1
    bits = shape.family in (None, "sm_80", "sm_86")
    return DecodeConfig(block, warps, stages, choose_splits(shape, block), bits)


def choose_splits(shape: AttentionShape, block: int, resident: int = 2) -> int:
    """Programs per context, from slots, KV heads, capacity and multiprocessors.

    ``resident`` is how many programs one multiprocessor holds at a time.
    """
    lanes = resident * card(shape.family).multiprocessors
    blocks = pl.cdiv(shape.pages_per_sequence * shape.page_size, block)
    programs = shape.slots * shape.kv_heads
    best, best_cost = 1, math.inf
    for splits in range(1, min(MAX_SPLITS, max(1, blocks // MIN_BLOCKS)) + 1):
        waves = pl.cdiv(programs * splits, lanes)
        cost = waves * (pl.cdiv(blocks, splits) + 3) + (3 if splits > 1 else 0)
        if cost < best_cost:
            best, best_cost = splits, cost
    return best


def decode_refusal(shape: AttentionShape) -> str | None:
    """Why this kernel cannot do ``shape``, or None."""
    if shape.group > 16 and _multiplies_float32(shape):
        return f"{shape.group} query heads per KV head in float32 are above 16: their tile does not fit the registers"
    return refusal(shape)


def _by_dots(
    static: Static, pages: Pages, q_ref: Any, first: Array, last: Array
) -> tuple[Array, Array, Array]:
    """Maximum ``[R]``, sum ``[R]`` and weighted V ``[R, D]`` of blocks first..last-1, for the R >= G rows of a tile."""
    rows = jnp.arange(max(MIN_ROWS, power_of_two(static.group)), dtype=jnp.int32)
    mask = (rows < static.group)[:, None] & (pages.dims < static.dim)[None, :]
    heads = pages.head * static.group + rows
    q = plt.load(q_ref.at[pages.slot, heads[:, None], pages.dims[None, :]], mask=mask, other=0)
    q = q.astype(static.score_dtype)
    precision = lax.Precision.HIGHEST if static.score_dtype == jnp.float32 else None

    def body(i: Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        ids, scales, top, total, acc = carry
        k = pages.rows(pages.k, i, ids)
        v = pages.rows(pages.v, i, ids)
        k_scale, v_scale = (scales[0][None, :], scales[1][None, :]) if scales else (None, None)
        raw = plt.dot(q, pages.cast(k, static.score_dtype), trans_b=True, precision=precision)
        scores = jnp.where(pages.visible(i)[None, :], scores_of(static, raw, k_scale), MASKED)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        decay = jnp.exp2(top - new_top)
        p = jnp.exp2(scores - new_top[:, None])
        total = total * decay + jnp.sum(p, axis=1)
        weights = (p if v_scale is None else p * v_scale).astype(static.value_dtype)
        out = plt.dot(weights, pages.cast(v, static.value_dtype), precision=precision)
        ids = pages.ids(i + 1)
        return ids, pages.scales(i + 1, ids), new_top, total, acc * decay[:, None] + out

    ids = pages.ids(first)
    start = (
        ids,
        pages.scales(first, ids),
        jnp.full(rows.shape, MASKED, jnp.float32),
        jnp.zeros(rows.shape, jnp.float32),
        jnp.zeros((rows.size, pages.dims.size), jnp.float32),
    )
    return lax.fori_loop(first, last, body, start)[2:]


def _by_sums(static: Static, pages: Pages, q_ref: Any, first: Array, last: Array) -> list[tuple[Array, ...]]:
    """The same for each of the G heads without matrix units: maximum and sum are scalars, weighted V ``[D]``.

    Each of the T lanes keeps a softmax of its own over the positions that it meets, and they are merged at the end. So
    nothing but the product of q and K is summed across threads inside the loop.
    """
    inside = pages.dims < static.dim
    queries = [
        plt.load(q_ref.at[pages.slot, pages.head * static.group + g, pages.dims], mask=inside, other=0)
        for g in range(static.group)
    ]
    queries = [q.astype(jnp.float32)[None, :] for q in queries]

    def body(i: Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        ids, scales, heads = carry
        k = pages.rows(pages.k, i, ids)
        v = pages.rows(pages.v, i, ids)
        next_ids = pages.ids(i + 1)
        k, v = pages.cast(k, jnp.float32), pages.cast(v, jnp.float32)
        k_scale, v_scale = scales or (None, None)
        seen = pages.visible(i)
        after = []
        for q, (top, total, acc) in zip(queries, heads, strict=True):
            scores = jnp.where(seen, scores_of(static, jnp.sum(k * q, axis=1), k_scale), MASKED)
            new_top = jnp.maximum(top, scores)
            decay = jnp.exp2(top - new_top)
            p = jnp.where(seen, jnp.exp2(scores - new_top), 0.0)
            weights = p if v_scale is None else p * v_scale
            after.append((new_top, total * decay + p, acc * decay[:, None] + weights[:, None] * v))
        return next_ids, pages.scales(i + 1, next_ids), tuple(after)

    lanes, ids = pages.lanes.shape, pages.ids(first)
    zero = (
        jnp.full(lanes, MASKED, jnp.float32),
        jnp.zeros(lanes, jnp.float32),
        jnp.zeros((*lanes, pages.dims.size), jnp.float32),
    )
    start = (ids, pages.scales(first, ids), (zero,) * static.group)
    results: list[tuple[Array, ...]] = []
    for top, total, acc in lax.fori_loop(first, last, body, start)[2]:
        highest = jnp.max(top, axis=0)
        decay = jnp.exp2(top - highest)
        results.append((highest, jnp.sum(total * decay, axis=0), jnp.sum(acc * decay[:, None], axis=0)))
    return results


def _uses_sums(static: Static) -> bool:
    """Whether a dot would mostly multiply padding."""
    return static.group == 1 or (static.score_dtype == jnp.float32 and static.group <= 2)


def _decode_kernel(
    static: Static, q_ref: Any, k_ref: Any, v_ref: Any, table_ref: Any, context_ref: Any, *rest: Any
) -> None:
    scales, out_refs = (rest[:2], rest[2:]) if static.quantized else ((None, None), rest)
    head, split, slot = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    context = jnp.minimum(plt.load(context_ref.at[slot]), static.capacity)
    start, first, total, per = span(static, context)
    begin = first + split * per
    end = jnp.minimum(begin + per, first + total)
    pages = Pages(static, slot, head, start, context, (k_ref, v_ref, table_ref, *scales))
    inside = pages.dims < static.dim

    def finish(where: tuple[Any, ...], dims: Array, mask: tuple[Any, Any], result: tuple[Array, ...]) -> None:
        """Stores the rows ``where`` = (index of heads) of a result."""
        top, total, acc, shown = result
        if static.splits == 1:
            out_ref = out_refs[0]
            out = jnp.where(shown > 0, acc / jnp.where(shown > 0, shown, 1.0), 0.0)
            plt.store(out_ref.at[slot, where[1], dims], out.astype(out_ref.dtype), mask=mask[1])
        else:
            acc_ref, top_ref, total_ref = out_refs
            plt.store(acc_ref.at[slot, split, where[1], dims], acc, mask=mask[1])
            plt.store(top_ref.at[slot, split, where[0]], top, mask=mask[0])
            plt.store(total_ref.at[slot, split, where[0]], total, mask=mask[0])

    def run() -> None:
        if _uses_sums(static):
            for g, (top, total, acc) in enumerate(_by_sums(static, pages, q_ref, begin, end)):
                at = head * static.group + g
                finish((at, at), pages.dims, (None, inside), (top, total, acc, total))
            return
        top, total, acc = _by_dots(static, pages, q_ref, begin, end)
        rows = jnp.arange(top.shape[0], dtype=jnp.int32)
        at, mine = head * static.group + rows, rows < static.group
        masks = (mine, mine[:, None] & inside[None, :])
        finish((at, at[:, None]), pages.dims[None, :], masks, (top, total, acc, total[:, None]))

    if static.splits == 1:
        run()  # a dead slot's loop is empty and it writes zeros
    else:
        pl.when(begin < end)(run)


def _merge_kernel(
    static: Static, context_ref: Any, acc_ref: Any, top_ref: Any, total_ref: Any, out_ref: Any
) -> None:
    """One (head, slot): the splits' results, weighted by their maxima and sums. Splits without work are not read."""
    head, slot = pl.program_id(0), pl.program_id(1)
    context = jnp.minimum(plt.load(context_ref.at[slot]), static.capacity)
    _, _, total, per = span(static, context)
    live = lax.div(total + per - 1, per)
    dims = jnp.arange(power_of_two(static.dim), dtype=jnp.int32)
    inside = dims < static.dim
    splits = jnp.arange(power_of_two(static.splits), dtype=jnp.int32)
    top = plt.load(top_ref.at[slot, splits, head], mask=splits < live, other=MASKED)
    sums = plt.load(total_ref.at[slot, splits, head], mask=splits < live, other=0.0)
    highest = jnp.max(top, axis=0)
    denominator = jnp.sum(sums * jnp.exp2(top - highest), axis=0)

    def body(i: Array, acc: Array) -> Array:
        at = i * MERGE_CHUNK + jnp.arange(MERGE_CHUNK, dtype=jnp.int32)
        mine = at < live
        part = plt.load(top_ref.at[slot, at, head], mask=mine, other=MASKED)
        rows = plt.load(
            acc_ref.at[slot, at[:, None], head, dims[None, :]],
            mask=mine[:, None] & inside[None, :],
            other=0.0,
        )
        return acc + rows * jnp.exp2(part - highest)[:, None]

    chunks = lax.div(live + (MERGE_CHUNK - 1), jnp.int32(MERGE_CHUNK))
    acc = lax.fori_loop(0, chunks, body, jnp.zeros((MERGE_CHUNK, dims.size), jnp.float32))
    out = jnp.sum(acc, axis=0)
    out = jnp.where(denominator > 0, out / jnp.where(denominator > 0, denominator, 1.0), 0.0)
    plt.store(out_ref.at[slot, head, dims], out.astype(out_ref.dtype), mask=inside)


def _dtypes(q: Any, kv: Any) -> tuple[Any, Any]:
    """In which dtypes q times K and probabilities times V are multiplied."""
    if q == jnp.float32 or kv == jnp.float32:
        return jnp.float32, jnp.float32
    if jnp.dtype(kv).name in QUANTIZED:
        return q, jnp.bfloat16  # probability times scale may be too small for float16
    return (q, q) if q == kv else (jnp.float32, jnp.float32)


def _multiplies_float32(shape: AttentionShape) -> bool:
    return _dtypes(jnp.dtype(shape.dtype), jnp.dtype(shape.kv_dtype))[0] == jnp.float32


def paged_decode(
    q: Float[Array, "S H D"],
    k_pages: Array,
    v_pages: Array,
    block_table: Int[Array, "S W"],
    context_len: Int[Array, "S"],
    *,
    options: AttentionOptions,
    k_scales: Float[Array, "P K"] | None = None,
    v_scales: Float[Array, "P K"] | None = None,
    config: DecodeConfig | None = None,
    interpret: bool = False,
) -> Float[Array, "S H D"]:
    """See ops.paged_decode. ``config`` None means ``default_config``. Raises ValueError for what is refused."""
    shape = AttentionShape.of(q, k_pages, block_table)
    if (reason := decode_refusal(shape)) is not None:
        raise ValueError(f"paged_decode: the Triton kernel cannot do this: {reason}")
    config = default_config(shape) if config is None else config
    slots, heads, dim = q.shape
    static = Static(
        options,
        config,
        shape.group,
        dim,
        shape.page_size,
        shape.page_size * shape.pages_per_sequence,
        k_scales is not None,
        *_dtypes(q.dtype, k_pages.dtype),
    )
    operands: tuple[Any, ...] = (q, k_pages, v_pages, block_table, context_len)
    if static.quantized:
        operands += (k_scales, v_scales)
    result = jax.ShapeDtypeStruct(q.shape, q.dtype)
    partials = [jax.ShapeDtypeStruct((slots, config.splits, heads, dim), jnp.float32)]
    partials += [jax.ShapeDtypeStruct((slots, config.splits, heads), jnp.float32)] * 2
    out = pl.pallas_call(
        functools.partial(_decode_kernel, static),
        grid=(shape.kv_heads, config.splits, slots),
        out_shape=[result] if config.splits == 1 else partials,
        compiler_params=plt.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="paged_decode",
    )(*operands)
    if config.splits == 1:
        return out[0]
    return pl.pallas_call(
        functools.partial(_merge_kernel, static),
        grid=(heads, slots),
        out_shape=result,
        compiler_params=plt.CompilerParams(num_warps=2, num_stages=1),
        interpret=interpret,
        name="paged_decode_merge",
    )(context_len, *out)
