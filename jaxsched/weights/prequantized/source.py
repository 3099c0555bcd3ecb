"""A source of tensors over one that holds quantised kernels under their format's own names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ...models.quantized import KernelFormat
from ..errors import CheckpointError
from ..quantize import Kernel
from ..source import TensorSource
from .compressed import open_compressed_tensors, open_float8
from .packed import open_awq, open_gptq
from .reader import Reader

METHODS = {
    "awq": open_awq,
    "gptq": open_gptq,
    "compressed-tensors": open_compressed_tensors,
    "fp8": open_float8,
}


class PrequantizedSource:
    """A TensorSource that shows each quantised matrix as ``NAME.weight`` ``[O, I]`` and the other tensors as they are.

    ``read`` gives a quantised matrix dequantised (float32); ``read_quantized`` as it is, if ``formats`` names it.
    """

    declared = True  # the checkpoint says that it is quantised

    def __init__(self, source: TensorSource, reader: Reader):
        self._source, self._reader = source, reader

    def shapes(self) -> dict[str, tuple[int, ...]]:
        plain = {n: shape for n, shape in self._source.shapes().items() if n not in self._reader.tensors}
        return plain | {f"{name}.weight": found.shape for name, found in self._reader.matrices.items()}

    def file_of(self, name: str) -> Path:
        matrix = name.removesuffix(".weight")
        if matrix in self._reader.matrices:  # the first of its tensors stands for all
            name = min(tensor for tensor in self._reader.tensors if tensor.rpartition(".")[0] == matrix)
        return self._source.file_of(name)

    def read(self, name: str) -> np.ndarray:
        matrix = name.removesuffix(".weight")
        if name.endswith(".weight") and matrix in self._reader.matrices:
            return np.ascontiguousarray(self._reader.values(matrix).T)
        return self._source.read(name)

    def formats(self) -> dict[str, KernelFormat]:
        """Matrix name, without ".weight" -> format, of those that ``read_quantized`` can read.

        Left out are those whose groups are no runs of rows: GPTQ with ``desc_act``, blocks that do not divide the rows.
        """
        return {n: found.format for n, found in self._reader.matrices.items() if found.format is not None}

    def read_quantized(self, name: str) -> Kernel:
        """Stored numbers ``[I, O]``, scale and offset ``[G, O]`` of a matrix of ``formats``: the file's own values."""
        return self._reader.kernel(name)


def open_prequantized(source: TensorSource, config: dict[str, Any]) -> TensorSource:
    """``source`` seen through the ``quantization_config`` of config.json; ``source`` itself if there is none.

    Raises CheckpointError for a method or variant that is not supported and for tensors that do not fit it.
    """
    quantization = config.get("quantization_config") or config.get("compression_config")
    if not quantization:
        return source
    if not isinstance(quantization, dict):
        raise CheckpointError(f"quantization_config is {quantization!r}; it must be an object")
    method = quantization.get("quant_method")
    if method not in METHODS:
        raise CheckpointError(
            f"quantization method {method!r} is not supported; supported: {', '.join(METHODS)}. "
            "Use a checkpoint of one of these, or the unquantised one"
        )
    return PrequantizedSource(source, METHODS[method](source, quantization))
