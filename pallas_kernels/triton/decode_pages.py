"""What the decode kernel of the Triton backend knows when it is traced, and how it gets at a slot's pages.

Shapes: T positions of a block, G query heads per KV head, D head_dim, Z positions per page, W pages per sequence.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt
from jaxtyping import Array

from ..shapes import AttentionOptions
from .common import LOG2E, decode_float8, power_of_two

MIN_BLOCKS = 2  # blocks of a split below which its partial result would cost more than the split saves


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Sizes of one decode kernel. None of them changes what is computed beyond the order of sums."""

    block: int  # positions per iteration, a power of two, at least 16
    num_warps: int
    num_stages: int  # of the software pipeline; for dots only
    splits: int  # programs that share one context
    decode_bits: bool = False  # float8 pages by integer arithmetic: below sm_89 there is no cast


@dataclasses.dataclass(frozen=True)
class Static:
    """What the kernels know when they are traced."""

    options: AttentionOptions
    config: DecodeConfig
    group: int
    dim: int
    page_size: int
    capacity: int  # W * Z
    quantized: bool
    score_dtype: Any  # in which q and K are multiplied
    value_dtype: Any  # in which probabilities and V are multiplied

    @property
    def splits(self) -> int:
        return self.config.splits


def span(static: Static, context: Array) -> tuple[Array, Array, Array, Array]:
    """First visible position, first block, blocks of the live context, and blocks per split. All int32 scalars."""
    block, window = static.config.block, static.options.window
    start = jnp.int32(0) if window is None else jnp.maximum(context - window, 0)
    first = lax.div(start, jnp.int32(block))
    total = lax.div(context + (block - 1), jnp.int32(block)) - first
    if static.splits == 1:
        return start, first, total, total
    per = lax.div(total + (static.splits - 1), jnp.int32(static.splits))
    return start, first, total, jnp.maximum(per, MIN_BLOCKS)


class Pages:
    """Access of one program to its slot's K and V."""

    def __init__(
        self, static: Static, slot: Array, head: Array, start: Array, end: Array, refs: tuple[Any, ...]
    ):
        self.static, self.slot, self.head, self.start, self.end = static, slot, head, start, end
        self.k, self.v, self.table, self.k_scales, self.v_scales = refs
        self.lanes = jnp.arange(static.config.block, dtype=jnp.int32)
        self.dims = jnp.arange(power_of_two(static.dim), dtype=jnp.int32)

    def visible(self, block: Array) -> Array:
        """``[T]``: positions of this block that the query sees."""
        at = block * self.static.config.block + self.lanes
        seen = at < self.end
        return seen if self.static.options.window is None else seen & (at >= self.start)

    def ids(self, block: Array) -> Array:
        """Pages ``[T]`` of this block's positions; 0 where nothing is visible: garbage ids never become addresses."""
        at = block * self.static.config.block + self.lanes
        return plt.load(
            self.table.at[self.slot, _quotient(at, self.static.page_size)], mask=self.visible(block), other=0
        )

    def rows(self, ref: Any, block: Array, ids: Array) -> Array:
        """K or V of a block, ``[T, D]`` padded to a power of two; zeros where nothing is visible."""
        at = block * self.static.config.block + self.lanes
        mask = self.visible(block)[:, None] & (self.dims < self.static.dim)[None, :]
        where = (ids[:, None], _remainder(at, self.static.page_size)[:, None], self.head, self.dims[None, :])
        return plt.load(ref.at[where], mask=mask, other=0.0)

    def scales(self, block: Array, ids: Array) -> tuple[Array, ...]:
        """Scales ``[T]`` of K and V, or nothing if the pages need none."""
        if not self.static.quantized:
            return ()
        seen = self.visible(block)
        return tuple(
            plt.load(ref.at[ids, self.head], mask=seen, other=0.0) for ref in (self.k_scales, self.v_scales)
        )

    def cast(self, tile: Array, dtype: Any) -> Array:
        if tile.dtype == jnp.float8_e4m3fn and self.static.config.decode_bits:
            return decode_float8(tile).astype(dtype)
        return tile.astype(jnp.float32).astype(dtype) if self.static.quantized else tile.astype(dtype)


def _quotient(at: Array, size: int) -> Array:
    return at >> (size.bit_length() - 1) if size == power_of_two(size) else lax.div(at, jnp.int32(size))


def _remainder(at: Array, size: int) -> Array:
    return at & (size - 1) if size == power_of_two(size) else lax.rem(at, jnp.int32(size))


def scores_of(static: Static, raw: Array, k_scale: Array | None) -> Array:
    """Base-2 logits from products of q and K: scaled, capped."""
    cap = static.options.soft_cap
    factor = static.options.scale * (LOG2E if cap is None else 1.0 / cap)
    raw = raw * factor if k_scale is None else raw * (k_scale * factor)
    return raw if cap is None else jnp.tanh(raw) * (cap * LOG2E)
