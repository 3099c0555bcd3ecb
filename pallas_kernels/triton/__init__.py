"""Attention and KV writes in the Triton backend of Pallas, for compute capability 8.0 and newer."""

from .decode import decode_refusal, paged_decode
from .decode import default_config as decode_config
from .prefill import default_config as prefill_config
from .prefill import paged_prefill, prefill_refusal

__all__ = [
    "decode_config",
    "decode_refusal",
    "paged_decode",
    "paged_prefill",
    "prefill_config",
    "prefill_refusal",
]
