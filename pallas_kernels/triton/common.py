"""What the Triton kernels share: constants, float8 without a conversion, and what attention cannot do."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ..shapes import QUANTIZED, AttentionShape
from ..tuning import CARDS

MASKED = -1e30  # a finite minus infinity: MASKED - MASKED stays defined in rows that see nothing
LOG2E = math.log2(math.e)
FLOATS = ("float32", "bfloat16", "float16")


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n``, at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def decode_float8(x: Array) -> Array:
    """float8_e4m3fn to float32 by moving bits, exact but for NaN, which becomes ±480 (no quantiser writes it).

    Sign, exponent and mantissa in their places in a float16 are the value over 2**(15 - 7), the biases' difference.
    """
    bits = lax.bitcast_convert_type(x, jnp.int8).astype(jnp.int16)
    moved = ((bits << 7) & jnp.int16(0x3F80)) | (bits & jnp.int16(-0x8000))
    return lax.bitcast_convert_type(moved, jnp.float16).astype(jnp.float32) * 256.0


def refusal(shape: AttentionShape) -> str | None:
    """Why neither attention kernel here can do ``shape``, or None."""
    if not 1 <= shape.head_dim <= 256:
        return f"head_dim {shape.head_dim} is above 256"
    if shape.group > 64:
        return f"{shape.group} query heads per KV head are above 64"
    if shape.dtype not in FLOATS:
        return f"queries are {shape.dtype}; known: {', '.join(FLOATS)}"
    if shape.kv_dtype not in (*FLOATS, *QUANTIZED):
        return f"pages are {shape.kv_dtype}; known: {', '.join((*FLOATS, *QUANTIZED))}"
    size = shape.num_pages * shape.page_size * shape.kv_heads * shape.head_dim
    if shape.kv_dtype in QUANTIZED and 2**31 <= size <= 2**32:
        return f"a cache of {size} one-byte elements is between 2 and 4 GiB, where Triton's 32-bit offsets overflow"
    if shape.family is not None and shape.family not in CARDS:
        return f"GPU family {shape.family} is not among {', '.join(CARDS)}"
    return None
