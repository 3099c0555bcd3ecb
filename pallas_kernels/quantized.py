"""Pages of one byte per value: how rows are quantised into them, in plain XLA. ``triton/write.py`` has the same kernel.

A page has one scale per KV head; value = stored * scale. Scales are powers of two, so that

- the scale of a page is that of its largest row, whatever the order or the calls in which its rows came;
- growing a scale only shifts what is stored. float8 values shift without loss (but for those that become subnormal);
  int8 values are rounded once more, half to even, so a value is off by at most scale/2 if its page has not grown since,
  and by less than one scale in any case.

NaN is stored as 0, and infinities as the largest value that the page holds: neither changes a scale.

Shapes: T rows, P pages, Z positions per page, K KV heads, D head_dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Num

from .shapes import QUANTIZED

SMALLEST_EXPONENT = -64  # of a scale: rows of zeros have it, and values below 2**-65 become zeros
SMALLEST = 2.0**SMALLEST_EXPONENT
BIAS, MANTISSA = 127, 23  # of float32
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}  # that is stored


def scale_for(absmax: Float[Array, "*N"], kv_dtype: str) -> Float[Array, "*N"]:
    """The smallest power of two by which ``absmax`` (finite, float32) fits, at least ``SMALLEST``. Exact: bits only."""
    # 127 = 1.984375 * 2**6, 448 = 1.75 * 2**8: a larger mantissa needs one power more.
    power, mantissa = {"int8": (6, 0x7E0000), "float8_e4m3fn": (8, 0x600000)}[kv_dtype]
    bits = lax.bitcast_convert_type(absmax, jnp.int32)
    more = ((bits & 0x7FFFFF) > mantissa).astype(jnp.int32)
    field = jnp.maximum((bits >> MANTISSA) - power + more, BIAS + SMALLEST_EXPONENT)
    return lax.bitcast_convert_type(field << MANTISSA, jnp.float32)


def inverse(scale: Float[Array, "*N"]) -> Float[Array, "*N"]:
    """1 / scale for powers of two from ``SMALLEST`` on, exact on every device."""
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    return lax.bitcast_convert_type((2 * BIAS << MANTISSA) - bits, jnp.float32)


def encode(x: Float[Array, "*N"], kv_dtype: str) -> Num[Array, "*N"]:
    """float32 values, already divided by the scale, as they are stored: rounded half to even, saturated."""
    largest = LARGEST[kv_dtype]
    x = jnp.clip(jnp.where(x == x, x, 0), -largest, largest)
    return (jnp.round(x) if kv_dtype == "int8" else x).astype(kv_dtype)


def dequantize(pages: Num[Array, "P Z K D"], scales: Float[Array, "P K"]) -> Float[Array, "P Z K D"]:
    """float32 values of whole pages."""
    return pages.astype(jnp.float32) * scales[:, None, :, None]


def first_rows(page: Int[Array, "T"], num_pages: int) -> Array:
    """Index ``[T]`` of the first row of each row's run; a run is neighbouring rows of one page."""
    rows = jnp.arange(page.shape[0], dtype=jnp.int32)
    begins = (rows == 0) | (page != jnp.roll(page, 1)) | (page >= num_pages)
    return lax.cummax(jnp.where(begins, rows, 0))


def write_kv_quantized(
    pages: Num[Array, "P Z K D"],
    scales: Float[Array, "P K"],
    rows: Float[Array, "T K D"],
    page: Int[Array, "T"],
    offset: Int[Array, "T"],
) -> tuple[Num[Array, "P Z K D"], Float[Array, "P K"]]:
    """``pages`` (int8 or float8_e4m3fn) with ``rows`` quantised into ``(page, offset)``, and their ``scales``.

    A row whose page is out of range (>= P) changes nothing. The rows of one page stand together with offsets rising by
    one. A row at offset 0 begins the page: what its scale and its contents were before is forgotten. Otherwise the page
    has been written from offset 0 on by this function, and where its scale grows its contents are requantised.
    In place when ``pages`` and ``scales`` are donated or carried by a scan; only pages that rows go to are read.
    """
    kv_dtype = jnp.dtype(pages.dtype).name
    assert kv_dtype in QUANTIZED, f"pages of {kv_dtype} have no scales"
    count, total = page.shape[0], pages.shape[0]
    wide = rows.astype(jnp.float32)
    size = jnp.abs(wide)
    need = scale_for(jnp.max(jnp.where(size < jnp.inf, size, 0), axis=-1), kv_dtype)  # [T, K]
    first = first_rows(page, total)
    need = jax.ops.segment_max(need, first, num_segments=count, indices_are_sorted=True)
    leads = (first == jnp.arange(count)) & (page < total)
    known = jnp.minimum(page, total - 1)
    old = jnp.where(offset[:, None] == 0, SMALLEST, jnp.maximum(scales[known], SMALLEST))  # [T, K]
    new = jnp.maximum(old, need)  # of meaning in leading rows

    grown = (leads & (offset > 0))[:, None] & (new > old)  # [T, K]
    stored = pages[known]
    shifted = encode(stored.astype(jnp.float32) * (old * inverse(new))[:, None, :, None], kv_dtype)
    earlier = jnp.arange(pages.shape[1]) < offset[:, None]  # [T, Z]
    stored = jnp.where(earlier[:, :, None, None] & grown[:, None, :, None], shifted, stored)
    pages = pages.at[jnp.where(jnp.any(grown, axis=-1), page, total)].set(stored, mode="drop")
    scales = scales.at[jnp.where(leads, page, total)].set(new, mode="drop")
    fresh = encode(wide * inverse(new[first])[:, :, None], kv_dtype)
    return pages.at[page, offset].set(fresh, mode="drop"), scales
