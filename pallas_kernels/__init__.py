"""Attention over paged KV caches. Import as ``jaxsched.pallas_kernels``."""

if not __name__.startswith("jaxsched."):
    raise ImportError(
        "this folder is part of jaxsched and must be imported as 'jaxsched.pallas_kernels', not as a top-level "
        "'pallas_kernels'; run from another folder or install the package"
    )

from .grouped import grouped_matmul
from .ops import (
    IMPLEMENTATIONS,
    paged_decode,
    paged_prefill,
    refusal,
    rotate_and_write,
    write_kv,
    write_kv_quantized,
)
from .products import Stored, quantized_matmul
from .shapes import AttentionOptions, AttentionShape

__all__ = [
    "IMPLEMENTATIONS",
    "AttentionOptions",
    "AttentionShape",
    "Stored",
    "grouped_matmul",
    "paged_decode",
    "paged_prefill",
    "quantized_matmul",
    "refusal",
    "rotate_and_write",
    "write_kv",
    "write_kv_quantized",
]
