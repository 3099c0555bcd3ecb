"""Attention over pages in plain XLA, written for the CPU: blocks of pages, online softmax, work bounded by the context.

The loops run as far as the longest context needs, so their trip counts are dynamic. On a CPU that is free.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .shapes import AttentionOptions, AttentionShape

MASKED = -1e30  # a finite minus infinity: exp(MASKED - MASKED) stays defined in rows that see nothing
DECODE_BLOCK = (
    64  # positions per iteration of the decode loop: small enough for the gathered block to stay in cache
)
PREFILL_BLOCK = 128  # positions per iteration of the prefill loop
PREFILL_TILE = 64  # query rows per tile of the prefill loop


def _blocks_of(pages: Array, block_table: Array, target: int) -> tuple[Array, int]:
    """Table padded to whole blocks, and pages per block: about ``target`` positions, never more than a sequence."""
    page_size, width = pages.shape[1], block_table.shape[1]
    per_block = min(max(1, target // page_size), width)
    padding = -width % per_block
    return jnp.pad(jnp.clip(block_table, 0, pages.shape[0] - 1), ((0, 0), (0, padding))), per_block


def _update(
    carry: tuple[Array, Array, Array], scores: Array, weigh: Callable[[Array], Array]
) -> tuple[Array, Array, Array]:
    """One step of the online softmax: ``scores [..., T]`` already masked, ``weigh(p)`` multiplies by V."""
    top, total, acc = carry
    new_top = jnp.maximum(top, scores.max(-1))
    p = jnp.exp(scores - new_top[..., None])
    decay = jnp.exp(top - new_top)
    return new_top, total * decay + p.sum(-1), acc * decay[..., None] + weigh(p)


def decode_refusal(shape: AttentionShape) -> str | None:
    """Why this backend cannot do ``shape``: it can do all."""
    return None


prefill_refusal = decode_refusal


def _cap(scores: Array, options: AttentionOptions) -> Array:
    return scores if options.soft_cap is None else options.soft_cap * jnp.tanh(scores / options.soft_cap)


def _load(pages: Array, scales: Array | None, ids: Array) -> Array:
    """float32 values of the pages ``ids``: ``[*ids, Z, K, D]``."""
    values = pages[ids].astype(jnp.float32)
    return values if scales is None else values * scales[ids][..., None, :, None]


def paged_decode(
    q, k_pages, v_pages, block_table, context_len, *, options, k_scales=None, v_scales=None, **_
):  # see ops.paged_decode
    slots, heads, dim = q.shape
    page_size, kv_heads = k_pages.shape[1:3]
    width = kv_heads * dim
    table, per_block = _blocks_of(k_pages, block_table, DECODE_BLOCK)
    block = per_block * page_size
    # Each query head is spread over the width of all KV heads, zero outside its own: K and V blocks are then used as
    # they lie in the pages, without a transpose, at the price of K times the (few) multiplications.
    own = jnp.repeat(jnp.eye(kv_heads, dtype=jnp.float32), heads // kv_heads, axis=0)  # [H, K]
    spread = (q.astype(jnp.float32) * options.scale)[:, :, None, :] * own[None, :, :, None]
    spread = spread.reshape(slots, heads, width)
    first, skipped = jnp.zeros_like(context_len), 0
    if options.window is not None:
        first = jnp.maximum(context_len - options.window, 0)
        skipped = jnp.min(jnp.where(context_len > 0, first, jnp.max(context_len))) // block

    def body(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        ids = lax.dynamic_slice(table, (0, i * per_block), (slots, per_block))
        at = i * block + jnp.arange(block)[None, :]
        seen = (at < context_len[:, None]) & (at >= first[:, None])  # [S, T]
        k = _load(k_pages, k_scales, ids).reshape(slots, block, width)
        v = _load(v_pages, v_scales, ids).reshape(slots, block, width)
        v = jnp.where(seen[:, :, None], v, 0)
        scores = jnp.einsum("stw,shw->sth", k, spread, precision=lax.Precision.HIGHEST).swapaxes(1, 2)
        scores = jnp.where(seen[:, None, :], _cap(scores, options), MASKED)
        return _update(
            carry, scores, lambda p: jnp.einsum("sht,stw->shw", p, v, precision=lax.Precision.HIGHEST)
        )

    start = (
        jnp.full((slots, heads), MASKED, jnp.float32),
        jnp.zeros((slots, heads), jnp.float32),
        jnp.zeros((slots, heads, width), jnp.float32),
    )
    count = (jnp.max(context_len) + block - 1) // block
    _, total, acc = lax.fori_loop(skipped, count, body, start)
    out = jnp.einsum("shkd,hk->shd", acc.reshape(slots, heads, kv_heads, dim), own)
    total = jnp.where(context_len[:, None] > 0, total, 1)
    return jnp.where(context_len[:, None, None] > 0, out / total[..., None], 0).astype(q.dtype)


def _tiles(slot: Array, slots: int, tile: int) -> tuple[Array, Array, Array]:
    """Cuts packed rows into tiles of at most ``tile`` rows of one slot.

    Returns the tile of each row ``[C]`` (padding rows belong to none: C), the first row of each tile ``[C]``, and the
    number of tiles.
    """
    rows = slot.shape[0]
    index = jnp.arange(rows)
    real = slot < slots
    first = jnp.concatenate((jnp.ones(1, bool), slot[1:] != slot[:-1]))
    run_start = lax.cummax(jnp.where(first, index, 0))
    starts = real & ((index - run_start) % tile == 0)
    owner = jnp.where(real, jnp.cumsum(starts) - 1, rows)
    first_row = jnp.zeros(rows, jnp.int32).at[jnp.where(starts, owner, rows)].set(index, mode="drop")
    return owner, first_row, jnp.sum(starts)


def paged_prefill(
    q, k_pages, v_pages, block_table, slot, position, *, options, k_scales=None, v_scales=None, **_
):  # see ops
    rows, heads, dim = q.shape
    slots = block_table.shape[0]
    page_size, kv_heads = k_pages.shape[1:3]
    group = heads // kv_heads
    tile = min(PREFILL_TILE, rows)
    table, per_block = _blocks_of(k_pages, block_table, PREFILL_BLOCK)
    block = per_block * page_size
    owner, first_row, count = _tiles(slot, slots, tile)
    pad = ((0, tile), (0, 0), (0, 0))
    queries = jnp.pad(q.astype(jnp.float32) * options.scale, pad)
    owner, position = jnp.pad(owner, (0, tile), constant_values=rows), jnp.pad(position, (0, tile))

    def one_tile(t: Array, out: Array) -> Array:
        row = first_row[t]
        mine = lax.dynamic_slice(owner, (row,), (tile,)) == t
        where = jnp.where(mine, lax.dynamic_slice(position, (row,), (tile,)), -1)
        pages = table[jnp.minimum(slot[row], slots - 1)]
        part = lax.dynamic_slice(queries, (row, 0, 0), (tile, heads, dim))
        part = (
            part.reshape(tile, kv_heads, group, dim)
            .transpose(1, 2, 0, 3)
            .reshape(kv_heads, group * tile, dim)
        )
        last = jnp.max(where)
        lowest, first = jnp.int32(0), 0
        if options.window is not None:  # the tile's first row is its lowest position
            lowest = jnp.maximum(position[row] - options.window + 1, 0)
            first = lowest // block

        def body(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            ids = lax.dynamic_slice(pages, (i * per_block,), (per_block,))
            at = i * block + jnp.arange(block)
            k = _load(k_pages, k_scales, ids).reshape(block, kv_heads, dim)
            v = _load(v_pages, v_scales, ids).reshape(block, kv_heads, dim)
            v = jnp.where(((at >= lowest) & (at <= last))[:, None, None], v, 0)
            scores = jnp.einsum("krd,tkd->krt", part, k, precision=lax.Precision.HIGHEST)
            seen = at[None, :] <= where[:, None]
            if options.window is not None:
                seen &= at[None, :] > where[:, None] - options.window
            seen = jnp.tile(seen, (group, 1))  # [G*tile, T]
            scores = jnp.where(seen[None], _cap(scores, options), MASKED)
            return _update(
                carry, scores, lambda p: jnp.einsum("krt,tkd->krd", p, v, precision=lax.Precision.HIGHEST)
            )

        start = (
            jnp.full((kv_heads, group * tile), MASKED, jnp.float32),
            jnp.zeros((kv_heads, group * tile), jnp.float32),
            jnp.zeros((kv_heads, group * tile, dim), jnp.float32),
        )
        _, total, acc = lax.fori_loop(first, last // block + 1, body, start)
        new = acc / total[..., None]
        new = new.reshape(kv_heads, group, tile, dim).transpose(2, 0, 1, 3).reshape(tile, heads, dim)
        old = lax.dynamic_slice(out, (row, 0, 0), (tile, heads, dim))
        return lax.dynamic_update_slice(out, jnp.where(mine[:, None, None], new, old), (row, 0, 0))

    out = lax.fori_loop(0, count, one_tile, jnp.zeros((rows + tile, heads, dim), jnp.float32))
    return out[:rows].astype(q.dtype)
