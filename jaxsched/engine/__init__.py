"""The host engine: continuous batching with multi-step rounds."""

from .core import Engine, EngineSnapshot
from .stats import EngineStats

__all__ = ["Engine", "EngineSnapshot", "EngineStats"]
