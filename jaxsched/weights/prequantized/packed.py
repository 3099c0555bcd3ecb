"""AWQ and GPTQ: unsigned integers in 32-bit words, with a scale and a zero point per group and output.

value = (number - zero) * scale, with ``qzeros`` int32 ``[G, O / n]``, n numbers a word, and ``scales`` ``[G, O]``.

* AWQ (Lin et al. 2023, AutoAWQ's "gemm"): ``qweight`` ``[I, O / 8]``, eight outputs a word; of eight neighbours a word
  holds numbers 0, 2, 4, 6, 1, 3, 5, 7, lowest bits first, also in ``qzeros``.
* GPTQ (Frantar et al. 2022, AutoGPTQ and GPTQModel): ``qweight`` ``[I / n, O]``, n input rows a word, all in order. In
  ``checkpoint_format`` "gptq" 1 was subtracted from every zero point, borrowing from the next number of the word below
  zero; not in "gptq_v2". ``g_idx`` ``[I]`` names the group of each row: a run of rows each, except with ``desc_act``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from ...models.quantized import KernelFormat
from ..errors import CheckpointError
from ..packing import unpack_words
from ..quantize import Kernel
from ..source import TensorSource
from .reader import Matrix, Reader, repeated, require

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def open_awq(source: TensorSource, config: dict[str, Any]) -> Reader:
    bits = require("AWQ", config, "bits" if "bits" in config else "w_bit", (4,), 4)
    version = config.get("version", "gemm")
    require("AWQ", {"version": str(version).lower()}, "version", ("gemm",))
    group = config.get("group_size", config.get("q_group_size", 128))
    return _Packed(source, bits, group, rows_in_words=False, order=_AWQ_ORDER)


def open_gptq(source: TensorSource, config: dict[str, Any]) -> Reader:
    bits = require("GPTQ", config, "bits", (4, 8))
    require("GPTQ", config, "pack_dtype", ("int32",), "int32")
    overrides = [rule for rule in config.get("dynamic") or {} if not rule.startswith("-:")]
    if overrides:
        raise CheckpointError(
            f"GPTQ: other settings for some modules ({overrides[0]!r} in dynamic) are not supported; "
            "use a checkpoint with the same bits and groups everywhere"
        )
    key = "checkpoint_format" if "checkpoint_format" in config else "format"
    version = require("GPTQ", config, key, ("gptq", "gptq_v2"), "gptq")
    one = sum(1 << shift for shift in range(0, 32, bits)) if version == "gptq" else 0
    return _Packed(source, bits, config.get("group_size", 128), rows_in_words=True, added=one)


class _Packed(Reader):
    def __init__(
        self,
        source: TensorSource,
        bits: int,
        group: int,
        *,
        rows_in_words: bool,
        order: Sequence[int] | None = None,
        added: int = 0,
    ):
        super().__init__(source)
        self._bits, self._order, self._added = bits, order, np.uint32(added)
        self._axis = 0 if rows_in_words else 1
        self._middle = 1 << (bits - 1)
        for name in self.names("qweight"):
            self.matrices[name] = self._matrix(name, group)

    def _matrix(self, name: str, group: int) -> Matrix:
        words, count = self.part(name, "qweight"), 32 // self._bits
        if words.ndim != 2 or words.dtype != np.int32:
            raise CheckpointError(
                f"tensor '{name}.qweight' is {words.dtype} {words.shape}, not a matrix of int32"
            )
        rows, columns = (n * count if axis == self._axis else n for axis, n in enumerate(words.shape))
        if group != -1 and (group < 1 or rows % group):
            raise CheckpointError(
                f"tensor '{name}.qweight' has {rows} input rows, which are no groups of {group}"
            )
        groups = 1 if group == -1 else rows // group
        self.part(name, "scales", (groups, columns))
        self.part(name, "qzeros", (groups, columns // count))
        offset = bool((self._zeros(name) != self._middle).any())
        fmt = KernelFormat("int4" if self._bits == 4 else "int8", 0 if groups == 1 else group, offset)
        if self.has(name, "g_idx"):
            index = self.part(name, "g_idx", (rows,))
            if index.size and not (0 <= index.min() and index.max() < groups):
                raise CheckpointError(
                    f"tensor '{name}.g_idx' names groups that are not from 0 to {groups - 1}"
                )
            if not np.array_equal(index, np.arange(rows) // (rows // groups)):
                return Matrix((columns, rows), None)
        return Matrix((columns, rows), fmt)

    def _zeros(self, name: str) -> np.ndarray:
        words = self.part(name, "qzeros").view(np.uint32) + self._added
        return unpack_words(words, self._bits, 1, self._order)

    def _numbers(self, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Numbers ``[I, O]`` and zero points ``[G, O]``, both less the middle, int8; scales float32."""
        numbers = unpack_words(self.part(name, "qweight"), self._bits, self._axis, self._order)
        middle = np.uint8(self._middle)  # wraps around: 0..255 less 128 is -128..127 as int8
        scale = self.part(name, "scales").astype(np.float32)
        return (numbers - middle).view(np.int8), (self._zeros(name) - middle).view(np.int8), scale

    def kernel(self, name: str) -> Kernel:
        fmt = self.matrices[name].format
        assert fmt is not None, f"{name} has no format"
        numbers, zeros, scale = self._numbers(name)
        stored = numbers.astype(ml_dtypes.int4) if self._bits == 4 else numbers
        return stored, scale, -zeros.astype(np.float32) * scale if fmt.offset else None

    def values(self, name: str) -> np.ndarray:
        numbers, zeros, scale = self._numbers(name)
        if self.has(name, "g_idx"):
            index = self.part(name, "g_idx")
            zeros, scale = zeros[index], scale[index]
        else:
            zeros, scale = repeated(zeros, len(numbers)), repeated(scale, len(numbers))
        return (numbers.astype(np.float32) - zeros) * scale
