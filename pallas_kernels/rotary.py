"""Rotary position embedding (Su et al. 2021), alone and together with the write into pages, in plain XLA."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rotate(
    x: Float[Array, "T N D"], cos: Float[Array, "T 1 F"], sin: Float[Array, "T 1 F"]
) -> Float[Array, "T N D"]:
    """Rotates the two halves of each head, as Hugging Face lays Llama weights out. ``F = D/2``."""
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate((left * cos - right * sin, right * cos + left * sin), axis=-1).astype(x.dtype)


def rotate_and_write(
    heads: Float[Array, "T N D"],
    cos: Float[Array, "T 1 F"],
    sin: Float[Array, "T 1 F"],
    k_pages: Float[Array, "P Z K D"],
    v_pages: Float[Array, "P Z K D"],
    page: Int[Array, "T"],
    offset: Int[Array, "T"],
) -> tuple[Float[Array, "T H D"], Float[Array, "P Z K D"], Float[Array, "P Z K D"]]:
    """Rotated queries, and the pages with rotated keys and values; ``triton.write.rotate_and_write`` is its kernel."""
    kv_heads = k_pages.shape[2]
    q, k, v = jnp.split(heads, (heads.shape[1] - 2 * kv_heads, heads.shape[1] - kv_heads), axis=1)
    k = rotate(k, cos, sin).astype(k_pages.dtype)
    k_pages = k_pages.at[page, offset].set(k, mode="drop")
    v_pages = v_pages.at[page, offset].set(v.astype(v_pages.dtype), mode="drop")
    return rotate(q, cos, sin), k_pages, v_pages
