"""GGUF files: llama.cpp's names and layout on disk, Hugging Face's names and layout out of ``read``."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from jaxsched.gguf_file import GGUFError, GGUFTensor, read_gguf_header
from jaxsched.host_memory import empty_pages

from ..models import family_of
from ..models.quantized import KernelFormat
from .errors import CheckpointError
from .gguf_blocks import FORMATS, read_blocks
from .gguf_config import Arch, gguf_architecture, gguf_config
from .gguf_names import Place, places
from .gguf_rope import FACTORS
from .source import map_bytes

_PLAIN: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
QUANTIZED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
"""Block formats that ``read`` turns into float32."""
_SLICE = 1 << 18  # numbers dequantized together


class GGUFSource:
    """Tensors of one GGUF file, dequantized when read.

    ``config`` is the equivalent config.json. Whatever the converter did to the tensors ``read`` undoes, and a stack of
    experts is as many tensors.

    Raises CheckpointError for a file that is not GGUF, is truncated or corrupt, or holds an unsupported
    model, and ImportError when the optional library that dequantizes is not installed.
    """

    declared = False  # its weights may be of any type; only quantization="keep" keeps them as they are

    def __init__(self, path: Path):
        try:
            header = read_gguf_header(path)
        except GGUFError as error:
            raise CheckpointError(str(error)) from error
        row = gguf_architecture(header)
        self._library = _import_gguf()
        self.header = header
        self._kinds = {name: self._check(name, tensor) for name, tensor in header.tensors.items()}
        factors = {name: self._factors(name) for name in FACTORS if name in header.tensors}
        self.config = gguf_config(header, factors)
        self._places: dict[str, Place] = {}
        for name, tensor in header.tensors.items():
            if name not in factors:
                self._place(name, tensor, row)

    def _place(self, name: str, tensor: GGUFTensor, row: Arch) -> None:
        try:
            found = places(name, tensor, row, family_of(self.config).names, self.config)
        except ValueError as error:
            raise CheckpointError(
                f"{self.header.path}: tensor {name!r} {error}; the file is corrupt"
            ) from error
        for ours, place in found.items():
            if ours in self._places:
                raise CheckpointError(
                    f"{self.header.path}: two tensors stand for {ours!r}; the file is corrupt"
                )
            self._places[ours] = place

    def file_of(self, name: str) -> Path:
        return self.header.path

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: place.shape for name, place in self._places.items()}

    def formats(self) -> dict[str, KernelFormat]:
        """Matrix name, without ".weight" -> format, of those that ``read_quantized`` can read."""
        kept = {}
        for name, place in self._places.items():
            kind = self._kinds[place.source]
            if kind in FORMATS and name.endswith(".weight") and len(place.tensor.shape) > 1:
                kept[name.removesuffix(".weight")] = FORMATS[kind]
        return kept

    def read_quantized(self, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Stored numbers ``[I, O]``, scale and offset ``[G, O]`` of a matrix of ``formats``, as it is in the file."""
        place = self._places[name + ".weight"]
        rows = self._reordered(name + ".weight", place, self._rows(place))
        return read_blocks(self._kinds[place.source], rows)

    def read(self, name: str) -> np.ndarray:
        place = self._places[name]
        values = self._reordered(name, place, self._values(name, place))
        if place.transposed:
            values = values.T
        if place.offset:
            values = values.astype(np.float32, copy=False) - np.float32(place.offset)
        return values.reshape(place.shape)

    def _values(self, name: str, place: Place) -> np.ndarray:
        """The numbers as they are in the file: ``[rows, width]``, or ``[rows]`` of a vector."""
        kind, rows = self._kinds[place.source], self._rows(place)
        if kind in _PLAIN:
            values = rows.view(_PLAIN[kind])
        elif kind in QUANTIZED:
            values = self._dequantized(rows, kind, place.tensor.shape[-1])
        else:
            raise CheckpointError(
                f"{self.header.path}: tensor {name!r} has type {kind}; "
                f"supported: {', '.join((*_PLAIN, *QUANTIZED))}"
            )
        if len(place.tensor.shape) == 1:
            return values.reshape(-1)[place.first : place.first + place.rows]
        return values

    def _dequantized(self, rows: np.ndarray, kind: str, width: int) -> np.ndarray:
        """float32 values of blocks. Some rows at a time: the library makes several arrays of what it is given."""
        number = self._library.GGMLQuantizationType[kind]
        # Soon freed: what is not too large comes from memory that is used again and again.
        values = empty_pages((len(rows), width), np.float32, least=32 << 20)
        step = max(1, _SLICE // width)
        for i in range(0, len(rows), step):
            values[i : i + step] = self._library.quants.dequantize(rows[i : i + step], number)
        return values

    def _rows(self, place: Place) -> np.ndarray:
        """The bytes ``[rows, bytes]`` of a matrix or a part of one; of a vector those of all of it ``[1, bytes]``."""
        tensor, nbytes = place.tensor, self._nbytes(place.tensor)
        if len(tensor.shape) == 1:
            return map_bytes(self.header.path, tensor.offset, nbytes).reshape(1, -1)
        each = nbytes // math.prod(tensor.shape[:-1])
        start, count = tensor.offset + place.first * each, place.rows * each
        return map_bytes(self.header.path, start, count).reshape(place.rows, each)

    def _reordered(self, name: str, place: Place, rows: np.ndarray) -> np.ndarray:
        """``rows``, values or bytes, in Hugging Face's order along their first axis."""
        heads, parts = (place.permuted, 2) if place.permuted else (place.regrouped, 3)
        if not heads:
            return rows
        if rows.shape[0] % (parts * heads):
            raise CheckpointError(
                f"{self.header.path}: tensor {name!r} has {rows.shape[0]} rows, "
                f"not a multiple of {parts} × {heads} heads; the file is corrupt"
            )
        width = rows.shape[0] // heads // parts
        # Pairs (the rotation turns neighbours) to halves, or all of q, k and v to those of each head.
        split = (heads, width, 2) if place.permuted else (3, heads, width)
        first, second = (1, 2) if place.permuted else (0, 1)
        return rows.reshape(*split, *rows.shape[1:]).swapaxes(first, second).reshape(rows.shape)

    def _factors(self, name: str) -> np.ndarray:
        tensor = self.header.tensors[name]
        place = Place(name, tensor, tensor.shape, 0, math.prod(tensor.shape))
        return np.asarray(self._values(name, place), np.float32).reshape(tensor.shape)

    def _nbytes(self, tensor: GGUFTensor) -> int:
        block, size = self._library.GGML_QUANT_SIZES[self._library.GGMLQuantizationType(tensor.kind)]
        return math.prod(tensor.shape) // block * size

    def _check(self, name: str, tensor: GGUFTensor) -> str:
        """Name of the storage type, once the data is known to lie within the file."""
        where = f"{self.header.path}: tensor {name!r}"
        try:
            kind = self._library.GGMLQuantizationType(tensor.kind)
        except ValueError as error:
            raise CheckpointError(
                f"{where} has unknown type {tensor.kind}; supported: {', '.join((*_PLAIN, *QUANTIZED))}"
            ) from error
        block = self._library.GGML_QUANT_SIZES[kind][0]
        if not tensor.shape or tensor.shape[-1] % block:
            raise CheckpointError(
                f"{where} of shape {tensor.shape} is not made of {kind.name} blocks of {block}"
            )
        end = tensor.offset + self._nbytes(tensor)
        if end > self.header.size:
            raise CheckpointError(
                f"{self.header.path} is truncated: tensor {name!r} ends at byte {end}, "
                f"the file has {self.header.size}; download it again"
            )
        return kind.name


def _import_gguf() -> ModuleType:
    try:
        import gguf
    except ImportError as error:
        raise ImportError(
            "reading a GGUF file needs the package gguf; install it with: pip install gguf"
        ) from error
    return gguf
