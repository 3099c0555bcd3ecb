"""float32 reference: gathers every page of every row. Slow and plain; other implementations are checked against it."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


def _attend(q: Array, k: Array, v: Array, visible: Array, scale: float) -> Array:
    """``q [R,H,D]``, ``k``/``v`` ``[R,T,K,D]``, ``visible [R,T]`` -> ``[R,H,D]``; rows that see nothing get zeros."""
    rows, heads, dim = q.shape
    kv_heads = k.shape[2]
    q32 = q.astype(jnp.float32).reshape(rows, kv_heads, heads // kv_heads, dim)
    k32 = jnp.where(visible[:, :, None, None], k.astype(jnp.float32), 0)
    v32 = jnp.where(visible[:, :, None, None], v.astype(jnp.float32), 0)
    scores = jnp.einsum("rkgd,rtkd->rkgt", q32, k32, precision=lax.Precision.HIGHEST) * scale
    scores = jnp.where(visible[:, None, None, :], scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total == 0, 1, total)
    out = jnp.einsum("rkgt,rtkd->rkgd", weights, v32, precision=lax.Precision.HIGHEST)
    return out.reshape(rows, heads, dim).astype(q.dtype)


def _gather(pages: Array, table: Array) -> Array:
    """Pages of each row laid side by side: ``[R, W*Z, K, D]``."""
    rows = pages[jnp.clip(table, 0, pages.shape[0] - 1)]
    return rows.reshape(table.shape[0], -1, *pages.shape[2:])


def paged_decode(q, k_pages, v_pages, block_table, context_len, *, scale):  # see ops.paged_decode
    k, v = _gather(k_pages, block_table), _gather(v_pages, block_table)
    visible = jnp.arange(k.shape[1])[None, :] < context_len[:, None]
    return _attend(q, k, v, visible, scale)


def paged_prefill(q, k_pages, v_pages, block_table, slot, position, *, scale):  # see ops
    slots = block_table.shape[0]
    table = block_table[jnp.minimum(slot, slots - 1)]
    k, v = _gather(k_pages, table), _gather(v_pages, table)
    visible = (jnp.arange(k.shape[1])[None, :] <= position[:, None]) & (slot < slots)[:, None]
    return _attend(q, k, v, visible, scale)
