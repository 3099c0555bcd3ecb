"""Which family reads a checkpoint: by ``architectures`` first, then by ``model_type``."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from . import llama

FAMILIES: tuple[ModuleType, ...] = (llama,)


def supported_architectures() -> list[str]:
    """Names that ``architectures`` in a config.json may have."""
    return sorted(name for family in FAMILIES for name in family.ARCHITECTURES)


def family_of(config: dict[str, Any]) -> ModuleType:
    """The family module (``read_config``, ``weight_table``, ``DERIVED``) for a config.json.

    Raises ValueError that lists what is supported when no family claims the checkpoint.
    """
    architectures = config.get("architectures") or []
    if isinstance(architectures, str):
        architectures = [architectures]
    for family in FAMILIES:
        if any(name in family.ARCHITECTURES for name in architectures):
            return family
    if not architectures:
        for family in FAMILIES:
            if config.get("model_type") in family.MODEL_TYPES:
                return family
    asked = ", ".join(architectures) or f"model_type {config.get('model_type')!r}"
    raise ValueError(
        f"architecture {asked} is not supported; supported: {', '.join(supported_architectures())}"
    )
