"""Random paged caches: small poisoned ones to check kernels with, large ones to time them with."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsched.pallas_kernels.shapes import QUANTIZED, AttentionOptions


@dataclasses.dataclass(frozen=True)
class Case:
    """What is static about one check or timing."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: str = "bfloat16"
    kv_dtype: str = ""  # "" = dtype
    window: int | None = None
    soft_cap: float | None = None

    @property
    def pages(self) -> str:
        """dtype of the pages."""
        return self.kv_dtype or self.dtype

    @property
    def options(self) -> AttentionOptions:
        return AttentionOptions(self.head_dim**-0.5, self.window, self.soft_cap)

    def __str__(self) -> str:
        extra = [f"window {self.window}"] if self.window else []
        extra += [f"cap {self.soft_cap:g}"] if self.soft_cap else []
        kinds = self.dtype if self.pages == self.dtype else f"{self.dtype} on {self.pages}"
        return " ".join([f"H{self.heads} K{self.kv_heads} D{self.head_dim} Z{self.page_size}", kinds, *extra])


def needed(lengths: list[int], page_size: int) -> list[int]:
    """Pages that each sequence takes."""
    return [-(-n // page_size) for n in lengths]


def poisoned_pool(
    rng: np.random.Generator, lengths: list[int], case: Case, width: int, total: int
) -> tuple[Any, ...]:
    """``(k_pages, v_pages, table, k_scales, v_scales)`` as numpy arrays; scales are None unless pages are quantised.

    Unused pages and positions hold NaN, or the largest integer under a NaN scale. Behind each length the block table
    ``[S, width]`` holds ids that may be negative or beyond the ``total`` pages.
    """
    need = needed(lengths, case.page_size)
    assert sum(need) <= total and max(need) <= width, "the pool is too small for these lengths"
    table = rng.integers(-5, total + 1000, (len(lengths), width)).astype(np.int32)
    free = iter(rng.permutation(total).tolist())
    shape = (total, case.page_size, case.kv_heads, case.head_dim)
    used = np.zeros(shape[:2], bool)
    for row, (count, length) in enumerate(zip(need, lengths, strict=True)):
        table[row, :count] = [next(free) for _ in range(count)]
        at = np.arange(length)
        used[table[row, at // case.page_size], at % case.page_size] = True
    k, k_scales = _store(rng.standard_normal(shape, np.float32), used, case.pages)
    v, v_scales = _store(rng.standard_normal(shape, np.float32), used, case.pages)
    return k, v, table, k_scales, v_scales


def _store(values: np.ndarray, used: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Pages of ``dtype`` with poison where nothing is ``used [P, Z]``, and their scales ``[P, K]``."""
    nothing = ~used[:, :, None, None]
    if dtype not in QUANTIZED:
        return np.where(nothing, np.nan, values).astype(jnp.dtype(dtype)), None
    most = 127.0 if dtype == "int8" else 448.0
    scales = np.abs(np.where(nothing, 0, values)).max((1, 3)) / most
    scaled = values / np.where(scales == 0, 1, scales)[:, None, :, None]
    if dtype == "int8":
        stored = np.where(nothing, 127, np.clip(np.rint(scaled), -127, 127)).astype(np.int8)
    else:
        stored = np.where(nothing, np.nan, np.clip(scaled, -most, most)).astype(jnp.dtype(dtype))
    scales = np.where(used.any(1)[:, None], scales, np.nan)
    return stored, scales.astype(np.float32)


def large_pool(
    case: Case, slots: int, context: int, sets: int, seed: int = 0
) -> tuple[jax.Array, jax.Array, list[jax.Array], tuple[Any, Any]]:
    """``(k_pages, v_pages, tables, scales)`` on the device; ``sets`` disjoint block tables ``[slots, W]``.

    The pages are in random order. Timing goes through the tables in turn, so that what one call reads is not in the L2
    cache because of an earlier one.
    """
    width = -(-context // case.page_size)
    total = sets * slots * width
    keys = jax.random.split(jax.random.key(seed), 2)
    shape = (total, case.page_size, case.kv_heads, case.head_dim)

    def random_pages(key: jax.Array) -> jax.Array:
        if case.pages == "int8":
            return jax.random.randint(key, shape, -127, 128, jnp.int8)
        wide = jax.random.normal(key, shape, jnp.bfloat16 if case.pages in QUANTIZED else case.pages)
        return wide.astype(case.pages)

    make = jax.jit(random_pages)
    order = np.random.default_rng(seed).permutation(total).astype(np.int32).reshape(sets, slots, width)
    scales: tuple[Any, Any] = (None, None)
    if case.pages in QUANTIZED:
        one = jnp.full((total, case.kv_heads), 1 / 64 if case.pages == "int8" else 1.0, jnp.float32)
        scales = (one, one)
    return make(keys[0]), make(keys[1]), [jnp.asarray(table) for table in order], scales
