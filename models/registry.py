"""Which family reads a checkpoint: by ``architectures`` first, then by ``model_type``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

from . import gemma, gpt2, gpt_neox, granite, llama, mistral, olmo, phi3, qwen, starcoder2
from .config import ModelConfig
from .weights import Names, Rule, weight_table

FAMILIES: tuple[ModuleType, ...] = (
    llama, mistral, qwen, gemma, phi3, gpt2, olmo, granite, starcoder2, gpt_neox,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture: how its configuration is read and what its tensors are called."""

    architecture: str  # class name in config.json
    model_type: str
    names: Names
    reader: Callable[[dict[str, Any], str], ModelConfig]

    def read_config(self, config: dict[str, Any]) -> ModelConfig:
        """``config.json`` as a ModelConfig. Raises ValueError naming a field that is missing or not supported."""
        return self.reader(config, self.architecture)

    def weight_table(self, config: ModelConfig) -> dict[str, Rule]:
        """Parameter path of the decoder -> where it comes from in a Hugging Face checkpoint."""
        return weight_table(config, self.names)


def _collect() -> dict[str, Family]:
    families = {}
    for module in FAMILIES:
        for architecture, model_type in module.ARCHITECTURES.items():
            names = module.names(architecture) if hasattr(module, "names") else module.NAMES
            families[architecture] = Family(architecture, model_type, names, module.read_config)
    return families


_BY_ARCHITECTURE = _collect()
_BY_MODEL_TYPE = {family.model_type: family for family in _BY_ARCHITECTURE.values()}


def supported_architectures() -> list[str]:
    """Names that ``architectures`` in a config.json may have."""
    return sorted(_BY_ARCHITECTURE)


def family_of(config: dict[str, Any]) -> Family:
    """The family for a config.json.

    Raises ValueError that lists what is supported when no family claims the checkpoint.
    """
    architectures = config.get("architectures") or []
    if isinstance(architectures, str):
        architectures = [architectures]
    for name in architectures:
        if name in _BY_ARCHITECTURE:
            return _BY_ARCHITECTURE[name]
    model_type = config.get("model_type")
    if not architectures and model_type in _BY_MODEL_TYPE:
        return _BY_MODEL_TYPE[model_type]
    asked = ", ".join(map(str, architectures)) or f"model_type {model_type!r}"
    raise ValueError(
        f"architecture {asked} is not supported; supported: {', '.join(supported_architectures())}"
    )
