"""What the readers of all formats share."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any

import numpy as np

from ...models.quantized import KernelFormat
from ..errors import CheckpointError
from ..quantize import Kernel
from ..source import TensorSource


@dataclasses.dataclass(frozen=True)
class Matrix:
    """One quantised matrix. ``format`` None: its values can be read, but not kept in the form ``KernelFormat``."""

    shape: tuple[int, int]  # [O, I], as an unquantised checkpoint has it
    format: KernelFormat | None


class Reader(ABC):
    """The quantised matrices of one checkpoint, by name without ".weight"."""

    def __init__(self, source: TensorSource):
        self.source = source
        self.shapes = source.shapes()
        self.matrices: dict[str, Matrix] = {}
        self.tensors: set[str] = set()  # those that belong to a matrix

    @abstractmethod
    def kernel(self, name: str) -> Kernel:
        """The matrix in its format."""

    @abstractmethod
    def values(self, name: str) -> np.ndarray:
        """Its values ``[I, O]`` float32."""

    def names(self, part: str) -> list[str]:
        """Names of the matrices that have a tensor ``NAME.part``."""
        return [name.removesuffix(f".{part}") for name in self.shapes if name.endswith(f".{part}")]

    def has(self, name: str, part: str) -> bool:
        """Whether there is a tensor ``NAME.part``; from now on it belongs to the matrix."""
        found = f"{name}.{part}" in self.shapes
        if found:
            self.tensors.add(f"{name}.{part}")
        return found

    def part(self, name: str, part: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """The tensor ``NAME.part``. Raises CheckpointError if it is missing or not of ``shape``."""
        if not self.has(name, part):
            raise CheckpointError(f"tensor '{name}.{part}' is missing, which a quantised matrix has; "
                                  "download the checkpoint again")  # fmt: skip
        tensor = self.source.read(f"{name}.{part}")
        if shape is not None and tensor.shape != shape:
            raise CheckpointError(
                f"tensor '{name}.{part}' has shape {tensor.shape}, the quantised matrix needs {shape}; "
                "use the config.json that belongs to these weights"
            )
        return tensor


def require(
    where: str, config: dict[str, Any], key: str, allowed: Collection[Any], default: Any = None
) -> Any:
    """``config[key]``, or ``default`` without it. Raises CheckpointError if it is not one of ``allowed``."""
    value = config.get(key, default)
    if value not in allowed:
        raise CheckpointError(
            f"{where}: {key} {value!r} is not supported; supported: {', '.join(map(repr, allowed))}. "
            "Use another quantisation of this model, or the unquantised checkpoint"
        )
    return value


def repeated(scale: np.ndarray, rows: int) -> np.ndarray:
    """``[G, O]`` -> ``[rows, O]``."""
    return np.repeat(scale, rows // len(scale), axis=0)
