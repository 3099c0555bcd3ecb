"""jaxsched: functional LLM inference in JAX, with multi-step decode and chunked prefill in one pure step."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .async_llm import AsyncLLM, EngineClosedError, EngineDeadError, QueueFullError
    from .config import EngineConfig
    from .llm import LLM
    from .lora import LoRARequest
    from .request import CompletionOutput, EmbeddingOutput, Logprob, RequestOutput, ScoreOutput
    from .sampling_params import BeamSearchParams, SamplingParams, StructuredOutputsParams

_HOME = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "EngineClosedError": "async_llm",
    "EngineDeadError": "async_llm",
    "QueueFullError": "async_llm",
    "EngineConfig": "config",
    "LoRARequest": "lora",
    "BeamSearchParams": "sampling_params",
    "SamplingParams": "sampling_params",
    "StructuredOutputsParams": "sampling_params",
    "CompletionOutput": "request",
    "EmbeddingOutput": "request",
    "Logprob": "request",
    "RequestOutput": "request",
    "ScoreOutput": "request",
}
__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingOutput",
    "EngineClosedError",
    "EngineConfig",
    "EngineDeadError",
    "LoRARequest",
    "Logprob",
    "QueueFullError",
    "RequestOutput",
    "SamplingParams",
    "ScoreOutput",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    # Loaded on first use, so that importing the package (for a version, for a submodule) costs nothing.
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
