"""The three operations on a paged KV cache, and the one place where their implementation is chosen.

Shapes: S slots, C chunk rows, T rows of a step, P pages, Z positions per page, W pages per sequence, H query heads,
K KV heads, D head_dim. Pages ``[P, Z, K, D]``; ``block_table[s, i]`` is the page of positions ``i*Z .. i*Z+Z-1`` of
slot ``s``. Entries behind a sequence's length may hold anything, and so may the pages they name.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from . import reference, xla

IMPLEMENTATIONS: dict[str, object] = {"reference": reference, "xla": xla}


def _pick(operation: str, implementation: str | None) -> Callable[..., Array]:
    # The GPU kernels join here; XLA is what every platform can run.
    name = "xla" if implementation is None else implementation
    if name not in IMPLEMENTATIONS:
        raise ValueError(
            f"{operation}: implementation {name!r} is unknown; known: {', '.join(IMPLEMENTATIONS)}, or None"
        )
    return getattr(IMPLEMENTATIONS[name], operation)


def paged_decode(
    q: Float[Array, "S H D"],
    k_pages: Float[Array, "P Z K D"],
    v_pages: Float[Array, "P Z K D"],
    block_table: Int[Array, "S W"],
    context_len: Int[Array, "S"],
    *,
    scale: float,
    implementation: str | None = None,
) -> Float[Array, "S H D"]:
    """Attention of one query row per slot over that slot's first ``context_len`` positions.

    A slot with ``context_len`` 0 is skipped and gets zeros. Softmax in float32. ``implementation`` is "reference",
    "xla" or None (chosen by platform). Raises ValueError for an unknown one.
    Paging as in Kwon et al. 2023; online softmax as in Milakov & Gimelshein 2018.
    """
    fn = _pick("paged_decode", implementation)
    return fn(q, k_pages, v_pages, block_table, context_len, scale=scale)


def paged_prefill(
    q: Float[Array, "C H D"],
    k_pages: Float[Array, "P Z K D"],
    v_pages: Float[Array, "P Z K D"],
    block_table: Int[Array, "S W"],
    slot: Int[Array, "C"],
    position: Int[Array, "C"],
    *,
    scale: float,
    implementation: str | None = None,
) -> Float[Array, "C H D"]:
    """Causal attention of packed chunk rows, row ``r`` over positions ``0..position[r]`` of slot ``slot[r]``.

    The rows of one slot stand together with positions rising by one; their K and V are in the pages already. A row
    whose slot is out of range (padding) gets zeros. Raises ValueError for an unknown ``implementation``.
    """
    fn = _pick("paged_prefill", implementation)
    return fn(q, k_pages, v_pages, block_table, slot, position, scale=scale)


def write_kv(
    pages: Float[Array, "P Z K D"],
    rows: Float[Array, "T K D"],
    page: Int[Array, "T"],
    offset: Int[Array, "T"],
) -> Float[Array, "P Z K D"]:
    """``pages`` with ``rows`` written at ``(page, offset)``; rows whose page is out of range (>= P) are dropped.

    In place when ``pages`` is donated or carried by a scan. Negative pages would wrap: callers never pass them.
    """
    return pages.at[page, offset].set(rows.astype(pages.dtype), mode="drop", unique_indices=False)


def page_of(
    block_table: Int[Array, "S W"], slot: Int[Array, "T"], position: Int[Array, "T"], page_size: int
) -> Array:
    """Page ``[T]`` that holds ``position`` of ``slot``; out-of-range slots read the last row and must be masked."""
    slots, width = block_table.shape
    return block_table[jnp.minimum(slot, slots - 1), jnp.minimum(position // page_size, width - 1)]
