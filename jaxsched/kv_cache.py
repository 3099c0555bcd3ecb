"""The dtypes of the KV cache, and what its pages take."""

from __future__ import annotations

import jax.numpy as jnp

from jaxsched.models import ModelConfig
from jaxsched.pallas_kernels.shapes import QUANTIZED

ALIASES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}  # vLLM's names
KV_DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", *ALIASES)
SCALE_BYTES = 4  # float32


def resolve_kv_dtype(name: str, dtype: str) -> str:
    """Name of the dtype of KV pages for a setting in KV_DTYPES and a model that computes in ``dtype``."""
    return dtype if name == "auto" else ALIASES.get(name, name)


def is_quantized(kv_dtype: str) -> bool:
    """Whether pages of this dtype have a scale for each KV head."""
    return kv_dtype in QUANTIZED


def cut_between_pages(kv_dtype: str, chunk: int, page_size: int, max_len: int) -> bool:
    """Whether prompts are cut between pages only, so that what a quantised page of a prompt holds depends on nothing
    but its tokens (ARCHITECTURE.md, "Quantised KV"). Raises ValueError if ``chunk`` tokens are less than a page.
    """
    if is_quantized(kv_dtype) and chunk < min(page_size, max_len):
        raise ValueError(
            f"a chunk has {chunk} tokens, but with a KV cache of {kv_dtype} prompts are cut between pages, and a page "
            f"has {page_size}; raise prefill_chunk_size (or max_num_batched_tokens where that is the limit) or lower "
            "page_size"
        )
    return is_quantized(kv_dtype)


def bytes_per_token(model: ModelConfig, kv_dtype: str) -> int:
    """Bytes of K and V that one token takes over all layers, without the scales of its page."""
    return model.kv_bytes_per_token(jnp.dtype(kv_dtype).itemsize)


def bytes_per_page(model: ModelConfig, kv_dtype: str, page_size: int) -> int:
    """Bytes of one page over all layers: K and V and, where they are quantised, their scales."""
    scales = 2 * model.num_layers * model.num_kv_heads * SCALE_BYTES if is_quantized(kv_dtype) else 0
    return page_size * bytes_per_token(model, kv_dtype) + scales
