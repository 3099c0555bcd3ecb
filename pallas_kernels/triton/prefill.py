"""Ragged prefill attention over pages, Triton backend of Pallas (sm_80 and newer).

FlashAttention-2 (Dao 2023) over a block table (Kwon et al. 2023), with the query heads of one KV head packed as rows of
one matrix tile so that each KV block is loaded once per tile and KV head.

How the packed rows are cut. The chunk is cut into *aligned* tiles of ``block_q // group`` rows, a static number. A
tile that holds rows of several slots loops over them inside the kernel: each slot's rows are attended with all other
rows masked, over that slot's context only, and only they are stored. So there is no pre-pass and no table of tiles:
one launch per layer, and no program without work. Tiles cut at the borders between slots would save at most one pass
per slot, for some ten small launches per layer or a scan of ``slot`` in every program. Padding rows are a "slot" with
an empty context.

Order of the work. All tiles of one KV head stand together (they share KV in L2), the last tile first: later rows of a
sequence have longer contexts, so the short tiles fill the tail. With ``splits`` > 1 (a small chunk of a long prompt)
each tile is computed by several programs that take every ``splits``-th KV block; their float32 partials are merged in
XLA.

KV blocks lie on an absolute grid of ``block_kv`` positions, are taken in ascending order, and masked and unmasked
bodies compute the same bits. So a row's result depends on its own query, position and KV alone: not on the other
rows, nor on where in the chunk it stands.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int, Num

from ..shapes import QUANTIZED, AttentionOptions, AttentionShape
from ..tuning import card
from .common import LOG2E, MASKED, power_of_two, refusal
from .prefill_blocks import PrefillConfig, Refs, Static, dot, exp2_scaled, load_block, widen


class _Run(NamedTuple):
    """The rows of one slot in a tile."""

    head: Array  # KV head
    slot: Array
    position: Array  # [block_q], -1 in rows of other slots
    first: Array  # lowest position that any of the rows sees
    last: Array  # highest


def _attend_block(
    block: Array, carry: tuple, refs: Refs, q: Array, run: _Run, s: Static, masked: bool
) -> tuple[Array, Array, Array]:
    """One KV block of the online softmax. ``top`` is the running maximum of the scores in units of log2."""
    top, total, acc = carry
    start = block * s.config.block_kv
    at = start + jnp.arange(s.config.block_kv)
    live = None
    if masked:
        live = at <= run.last
        if s.options.window is not None:
            live &= at >= run.first
    k, v, k_scales, v_scales = load_block(refs, run.head, run.slot, start, live, s)
    scores = dot(q, widen(k, s.dot_dtype, s.config.fp8_bits), (1, 1))
    if k_scales is not None:
        scores *= k_scales[None, :]
    unit = abs(s.options.scale) * LOG2E  # the sign is in q
    if s.options.soft_cap is not None:
        scores = jnp.tanh(scores * (abs(s.options.scale) / s.options.soft_cap))
        unit = s.options.soft_cap * LOG2E
    if masked:
        seen = at[None, :] <= run.position[:, None]
        if s.options.window is not None:
            seen &= at[None, :] > run.position[:, None] - s.options.window
        scores = jnp.where(seen, scores, MASKED)
    new_top = jnp.maximum(top, jnp.max(scores, axis=1) * unit)
    p = exp2_scaled(scores, unit, new_top, s.interpret)
    if masked:
        p = jnp.where(seen, p, 0.0)
    decay = jnp.exp2(top - new_top)
    total = total * decay + jnp.sum(p, axis=1)
    if v_scales is not None:
        p *= v_scales[None, :]
    weighed = dot(p.astype(s.weigh_dtype), widen(v, s.weigh_dtype, s.config.fp8_bits), (1, 0))
    return new_top, total, acc * decay[:, None] + weighed


def _block_ranges(lowest: Array, last: Array, s: Static) -> tuple[Array, Array, Array, Array, Array]:
    """First position seen, and the borders of the KV blocks masked before, not masked, and masked after (half open).

    ``lowest`` and ``last`` are the lowest and highest position of the rows; ``last`` is -1 if there are none.
    """
    size, window = s.config.block_kv, s.options.window
    end = (last + size) // size
    if window is None:
        first = begin = inner = jnp.int32(0)
    else:
        first = jnp.maximum(lowest - window + 1, 0)
        begin = jnp.minimum(first // size, end)
        inner = jnp.clip((jnp.maximum(last - window + 1, 0) + size - 1) // size, begin, end)
    outer = jnp.clip((lowest + 1) // size, inner, end)
    return first, begin, inner, outer, end


def _kernel(*refs: Any, s: Static) -> None:
    """One program: a tile of the chunk, a share of the KV blocks, a KV head."""
    count = 8 if s.quantized else 6
    inputs, outputs = Refs(*refs[:count]), refs[count:]
    tile = pl.num_programs(0) - 1 - pl.program_id(0)
    share, head = pl.program_id(1), pl.program_id(2)
    splits = s.config.splits

    # Row m of the matrix tile is query head m % group of chunk row m // group; a group that is no power of two leaves
    # the last few rows of the tile unused.
    m = jnp.arange(s.config.block_q)
    begin = tile * s.tile_rows
    end = jnp.minimum(begin + s.tile_rows, s.rows)
    row = begin + m // s.group
    heads = head * s.group + m % s.group
    inside = row < end
    slots = plt.load(inputs.slot.at[row], mask=inside, other=s.slots)
    slots = jnp.where((slots < 0) | (slots >= s.slots), s.slots, slots)
    position = plt.load(inputs.position.at[row], mask=inside, other=-1)
    position = jnp.minimum(jnp.where(slots < s.slots, position, -1), s.width * s.page_size - 1)
    dim = jnp.arange(s.padded_dim)[None, :]
    whole = inside[:, None] if s.padded_dim == s.head_dim else inside[:, None] & (dim < s.head_dim)
    q = plt.load(inputs.q.at[row[:, None], heads[:, None], dim], mask=whole, other=0.0).astype(s.dot_dtype)
    if s.options.scale < 0:
        q = -q

    def attend_run(start: Array) -> Array:
        """Attends the rows of the slot of chunk row ``start`` and stores them; returns where the next slot begins."""
        slot = jnp.max(jnp.where(row == start, slots, -1))
        after = jnp.min(jnp.where((row > start) & (slots != slot), row, end))
        mine = (row >= start) & (row < after)
        last = jnp.max(jnp.where(mine, position, -1))
        lowest = jnp.min(jnp.where(mine, position, s.width * s.page_size))
        first, *borders = _block_ranges(lowest, last, s)
        run = _Run(head, slot, jnp.where(mine, position, -1), first, last)
        carry = (
            jnp.full((s.config.block_q,), MASKED, jnp.float32),
            jnp.zeros((s.config.block_q,), jnp.float32),
            jnp.zeros((s.config.block_q, s.padded_dim), jnp.float32),
        )
        # Blocks share, share + splits, ... : the share of a block depends on nothing but its place in the sequence.
        steps = [(border - share + splits - 1) // splits for border in borders]
        ranges = [(steps[0], steps[1], True), (steps[1], steps[2], False), (steps[2], steps[3], True)]
        for low, high, masked in ranges if s.options.window is not None else ranges[1:]:
            carry = lax.fori_loop(
                low,
                high,
                lambda i, c, masked=masked: _attend_block(share + i * splits, c, inputs, q, run, s, masked),
                carry,
            )
        _store(outputs, carry, jnp.where(mine, row, s.rows), heads, share, mine, s)
        return after

    lax.while_loop(lambda start: start < end, attend_run, begin)


def _store(
    outputs: tuple, carry: tuple, row: Array, heads: Array, share: Array, mine: Array, s: Static
) -> None:
    """The result, or with splits its parts. Rows that are not ``mine`` also point out of bounds (interpreter)."""
    top, total, acc = carry
    dim = jnp.arange(s.padded_dim)[None, :]
    mask = mine[:, None] if s.padded_dim == s.head_dim else mine[:, None] & (dim < s.head_dim)
    where = row[:, None], heads[:, None], dim
    if s.config.splits == 1:
        out = acc * (1.0 / jnp.where(total == 0.0, 1.0, total))[:, None]
        plt.store(outputs[0].at[where], out.astype(outputs[0].dtype), mask=mask)
        return
    plt.store(outputs[0].at[(share, *where)], acc, mask=mask)
    plt.store(outputs[1].at[share, row, heads], top, mask=mine)
    plt.store(outputs[2].at[share, row, heads], total, mask=mine)


def paged_prefill(
    q: Float[Array, "C H D"],
    k_pages: Num[Array, "P Z K D"],
    v_pages: Num[Array, "P Z K D"],
    block_table: Int[Array, "S W"],
    slot: Int[Array, "C"],
    position: Int[Array, "C"],
    *,
    options: AttentionOptions,
    k_scales: Float[Array, "P K"] | None = None,
    v_scales: Float[Array, "P K"] | None = None,
    config: PrefillConfig | None = None,
    interpret: bool = False,
) -> Float[Array, "C H D"]:
    """Causal attention of packed chunk rows, row ``r`` over positions ``0..position[r]`` of slot ``slot[r]``.

    Rows whose slot is out of range give zeros. See ``ops.paged_prefill`` for the arguments. ``config`` None takes
    `default_config` for an unknown GPU. Raises ValueError for what `prefill_refusal` refuses.
    """
    shape = AttentionShape.of(q, k_pages, block_table)
    if (reason := prefill_refusal(shape)) is not None:
        raise ValueError(f"paged_prefill: the Triton kernel cannot do this: {reason}")
    config = default_config(shape) if config is None else config
    if config.block_q < shape.group:
        raise ValueError(
            f"paged_prefill: block_q {config.block_q} is below the {shape.group} heads of a group"
        )
    s = _specialise(shape, options, config, q.dtype, k_pages.dtype, interpret)
    outputs = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    if config.splits > 1:
        part = (config.splits, shape.rows, shape.heads)
        outputs = [jax.ShapeDtypeStruct((*part, shape.head_dim), jnp.float32)]
        outputs += [jax.ShapeDtypeStruct(part, jnp.float32)] * 2
    flat = (shape.num_pages * shape.page_size * shape.kv_heads, shape.head_dim)
    scales = () if k_scales is None else (k_scales, v_scales)
    parts = pl.pallas_call(
        functools.partial(_kernel, s=s),
        out_shape=outputs,
        grid=(pl.cdiv(shape.rows, s.tile_rows), config.splits, shape.kv_heads),
        compiler_params=plt.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="paged_prefill",
    )(q, k_pages.reshape(flat), v_pages.reshape(flat), block_table, slot, position, *scales)
    return parts[0] if config.splits == 1 else _merge(*parts).astype(q.dtype)


def _specialise(
    shape: AttentionShape, options: AttentionOptions, config: PrefillConfig, q: Any, kv: Any, interpret: bool
) -> Static:
    quantized = jnp.dtype(kv).name in QUANTIZED
    dot = q if quantized else jnp.promote_types(q, kv)
    # With scales the probabilities carry V's: float16 has no room for small ones.
    weigh = jnp.bfloat16 if quantized and dot == jnp.float16 else dot
    return Static(
        options,
        config,
        shape.rows,
        shape.slots,
        shape.group,
        shape.kv_heads,
        shape.head_dim,
        max(16, power_of_two(shape.head_dim)),
        shape.page_size,
        shape.pages_per_sequence,
        dot,
        weigh,
        quantized,
        interpret,
    )


def _merge(acc: Array, top: Array, total: Array) -> Array:
    """Partials ``[splits, C, H, D]``, ``[splits, C, H]`` x 2 to ``[C, H, D]``; parts without work weigh 0.

    Term by term and not by reductions, which XLA would not fuse with each other: this becomes one kernel.
    """
    parts = range(acc.shape[0])
    highest = functools.reduce(jnp.maximum, [top[i] for i in parts])
    weights = [jnp.exp2(top[i] - highest) for i in parts]
    denominator = functools.reduce(jnp.add, [total[i] * weights[i] for i in parts])
    out = functools.reduce(jnp.add, [acc[i] * weights[i][..., None] for i in parts])
    return out / jnp.where(denominator == 0.0, 1.0, denominator)[..., None]


prefill_refusal = refusal


def default_config(shape: AttentionShape) -> PrefillConfig:
    """Tile sizes for ``shape``. Untuned: the largest that compiled without register spills within shared memory.

    On sm_90 the products are wgmma from ``block_q`` 64 on, for all dtypes but float32, which is multiplied without
    tensor cores. An unknown family gets what fits all of them.
    """
    big = card(shape.family).shared_memory > 200_000  # sm_90 and sm_100; more per block than the others have
    wide = power_of_two(shape.head_dim) > 128
    full = "float32" in (shape.dtype, shape.kv_dtype)
    if full:
        block_q, block_kv, stages = (32, 16, 2) if wide or not big else (64, 32, 2)
    elif wide:
        # The widened K and V pass through registers; blocks of 32 positions of them spill.
        small = shape.family in ("sm_90", "sm_120", "sm_121") and shape.kv_dtype in QUANTIZED
        block_q, block_kv = 32 if shape.family in ("sm_100", "sm_103") else 64, 16 if small else 32
        stages = 2
    elif not big and shape.kv_dtype in QUANTIZED:
        block_q, block_kv, stages = (64, 32, 3)
    else:  # masked columns of a padded head take registers
        block_q, block_kv, stages = (128, 64 if big and shape.head_dim in (16, 32, 64, 128) else 32, 3)
    warps = 4 if full and shape.group > 8 and not big else 8
    used = power_of_two(shape.rows * shape.group)
    if used < block_q:
        block_q = max(16, used, power_of_two(shape.group))
        warps = 8 if block_q >= 64 and not (big and block_q == 64) else 4
    context = shape.pages_per_sequence * shape.page_size
    block_kv = min(block_kv, max(16, power_of_two(context)))
    # Enough programs for the chip, but each split with at least eight blocks of the longest context it is made for.
    programs = -(-shape.rows // (block_q // shape.group)) * shape.kv_heads
    splits = min(card(shape.family).multiprocessors // programs, context // (8 * block_kv), 8)
    if wide and shape.family == "sm_90" and shape.kv_dtype in QUANTIZED:
        splits = 1  # with the parts' addresses too, four bytes would spill
    bits = shape.family is None or shape.family in ("sm_80", "sm_86")
    return PrefillConfig(block_q, block_kv, warps, stages, max(1, splits), bits)
