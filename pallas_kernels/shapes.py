"""What is static about a call of an attention kernel: its options, and the sizes by which a backend may refuse."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

QUANTIZED = ("int8", "float8_e4m3fn")  # dtypes of pages that need scales; value = stored * scale


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """The formula. ``scale`` multiplies q·k; then ``soft_cap``, then the mask of ``window``."""

    scale: float
    window: int | None = None  # a query at position p sees positions max(0, p - window + 1) .. p
    soft_cap: float | None = None  # scores = cap * tanh(scores / cap), as in Gemma 2

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(
                f"attention: window is {self.window}; it must be at least 1, or None for no window"
            )
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ValueError(
                f"attention: soft_cap is {self.soft_cap}; it must be positive, or None for no cap"
            )


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """Sizes of one call. ``family`` is the GPU's compute capability, such as "sm_90"; None = not known."""

    rows: int  # S of a decode, C of a prefill
    slots: int  # S
    heads: int  # H
    kv_heads: int  # K
    head_dim: int  # D
    page_size: int  # Z
    pages_per_sequence: int  # W
    num_pages: int  # P
    dtype: str  # of the queries and the result
    kv_dtype: str  # of the pages
    family: str | None = None

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    @staticmethod
    def of(q: Any, k_pages: Any, block_table: Any, family: str | None = None) -> AttentionShape:
        """The sizes of a call with ``q [R,H,D]``, pages ``[P,Z,K,D]`` and ``block_table [S,W]``."""
        rows, heads, dim = q.shape
        pages, size, kv_heads, _ = k_pages.shape
        slots, width = block_table.shape
        dtypes = jnp.dtype(q.dtype).name, jnp.dtype(k_pages.dtype).name
        return AttentionShape(rows, slots, heads, kv_heads, dim, size, width, pages, *dtypes, family)
