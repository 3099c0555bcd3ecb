"""The metadata of a GGUF model, of which every key must be read or known to change nothing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxsched.gguf_file import GGUFHeader

from .errors import CheckpointError

# Keys, without their prefix, that say nothing about the formula.
_NEUTRAL = {
    *("vocab_size", "tensor_data_layout", "pooling_type", "classifier.output_labels", "rope.scaling.finetuned"),
}  # fmt: skip


class Metadata:
    """The keys that begin with the name of a file's architecture. Each method reads one; ``done`` refuses the rest.

    Numbers are float32 in the file. They come as the shortest decimal that is the same float32, which is nearly always
    what stood in the config.json that was converted: 0.1, not 0.10000000149.
    """

    def __init__(self, header: GGUFHeader, architecture: str):
        self.header, self.prefix = header, architecture + "."
        self._read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Whatever the file says: a scalar, text or a list."""
        self._read.add(key)
        value = self.header.metadata.get(self.prefix + key)
        return default if value is None else value

    def number(self, key: str, default: Any = None) -> Any:
        """One number, where layers may each have one: then they must be equal."""
        value = self.get(key)
        if value is None:
            return default
        values = value if isinstance(value, list) else [value]
        if not values or any(isinstance(v, str) or v != values[0] for v in values):
            raise self.error(
                f"{self.prefix}{key} is {value!r:.80}; supported: one number, the same for every layer"
            )
        if isinstance(values[0], float) and not math.isfinite(values[0]):
            raise self.error(f"{self.prefix}{key} is {values[0]}, not a finite number; the file is corrupt")
        return shortest(values[0])

    def need(self, key: str) -> Any:
        """As ``number``, for a key without which there is no model."""
        value = self.number(key)
        if value is None:
            raise self.error(f"lacks the metadata {self.prefix + key!r}; the file is incomplete")
        return value

    def count(self, key: str, most: int, default: int | None = None) -> int:
        """A positive integer of at most ``most``; needed unless there is a default."""
        value = self.need(key) if default is None else self.number(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.error(f"{self.prefix}{key} is {value!r}; it must be an integer from 1 to {most}")
        return value

    def only(self, key: str, *values: Any) -> None:
        """Refuses every value of a key but these. The first is the one that is supported."""
        value = self.number(key)
        if value is not None and value not in values:
            raise self.error(f"{self.prefix}{key} is {value!r}; supported: {values[0]!r}")

    def has(self, tensor: str) -> bool:
        return tensor in self.header.tensors

    def done(self) -> None:
        """Raises CheckpointError for a key of the architecture that nobody has read and that says something."""
        for name, value in self.header.metadata.items():
            key = name.removeprefix(self.prefix)
            # Zero, false and nothing are what llama.cpp takes where a key is missing.
            if key == name or key in self._read or key in _NEUTRAL or not value:
                continue
            raise self.error(
                f"{name} is {shortest(value)!r:.80}, which is not known for this architecture and may change what the "
                "model computes; use the safetensors checkpoint of this model"
            )

    def error(self, text: str) -> CheckpointError:
        """An error that names the file; ``text`` goes on from its name."""
        return CheckpointError(f"{self.header.path}{'' if text.startswith('lacks') else ':'} {text}")


def shortest(value: Any) -> Any:
    """A float that is a float32 as the shortest decimal that rounds to it; anything else as it is."""
    if not isinstance(value, float) or float(np.float32(value)) != value:
        return value
    return float(str(np.float32(value)))
