"""float32 reference: gathers every page of every row. Slow and plain; other implementations are checked against it."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .shapes import AttentionOptions, AttentionShape


def _attend(q: Array, k: Array, v: Array, visible: Array, options: AttentionOptions) -> Array:
    """``q [R,H,D]``, ``k``/``v`` ``[R,T,K,D]``, ``visible [R,T]`` -> ``[R,H,D]``; rows that see nothing get zeros."""
    rows, heads, dim = q.shape
    kv_heads = k.shape[2]
    q32 = q.astype(jnp.float32).reshape(rows, kv_heads, heads // kv_heads, dim)
    k32 = jnp.where(visible[:, :, None, None], k.astype(jnp.float32), 0)
    v32 = jnp.where(visible[:, :, None, None], v.astype(jnp.float32), 0)
    scores = jnp.einsum("rkgd,rtkd->rkgt", q32, k32, precision=lax.Precision.HIGHEST) * options.scale
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    scores = jnp.where(visible[:, None, None, :], scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total == 0, 1, total)
    out = jnp.einsum("rkgt,rtkd->rkgd", weights, v32, precision=lax.Precision.HIGHEST)
    return out.reshape(rows, heads, dim).astype(q.dtype)


def _gather(pages: Array, scales: Array | None, table: Array) -> Array:
    """Pages of each row laid side by side, float32: ``[R, W*Z, K, D]``."""
    ids = jnp.clip(table, 0, pages.shape[0] - 1)
    rows = pages[ids].astype(jnp.float32)
    if scales is not None:
        rows = rows * scales[ids][:, :, None, :, None]
    return rows.reshape(table.shape[0], -1, *pages.shape[2:])


def _visible(length: int, last: Array, options: AttentionOptions) -> Array:
    """``[R, length]``: what a query at position ``last [R]`` sees; -1 sees nothing."""
    at = jnp.arange(length)[None, :]
    seen = at <= last[:, None]
    return seen if options.window is None else seen & (at > last[:, None] - options.window)


def paged_decode(
    q, k_pages, v_pages, block_table, context_len, *, options, k_scales=None, v_scales=None, **_
):  # see ops.paged_decode
    k, v = _gather(k_pages, k_scales, block_table), _gather(v_pages, v_scales, block_table)
    return _attend(q, k, v, _visible(k.shape[1], context_len - 1, options), options)


def paged_prefill(
    q, k_pages, v_pages, block_table, slot, position, *, options, k_scales=None, v_scales=None, **_
):  # see ops
    slots = block_table.shape[0]
    table = block_table[jnp.minimum(slot, slots - 1)]
    k, v = _gather(k_pages, k_scales, table), _gather(v_pages, v_scales, table)
    last = jnp.where(slot < slots, position, -1)
    return _attend(q, k, v, _visible(k.shape[1], last, options), options)


def decode_refusal(shape: AttentionShape) -> str | None:
    """Why this backend cannot do ``shape``: it can do all."""
    return None


prefill_refusal = decode_refusal
