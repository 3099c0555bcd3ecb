"""compressed-tensors (of llm-compressor), and the float8 checkpoints of DeepSeek, Qwen and others.

compressed-tensors: matrices ``[O, I]`` with ``weight_scale``: one number, ``[O, 1]``, ``[O, G]``, or one per block.

* "pack-quantized": ``weight_packed`` int32 ``[O, ceil(I / n)]`` holds numbers + 2^(bits-1), n a word, lowest bits
  first; ``weight_shape`` ``[2]``; ``weight_zero_point`` packed the same way, but down: ``[ceil(O / n), G]``;
* "int-quantized", "float-quantized", "naive-quantized": ``weight`` int8 or float8, ``weight_zero_point`` int8;
* value = (number - zero) * scale; ``weight_g_idx`` ``[I]`` names groups as GPTQ's ``g_idx`` does.

"fp8": ``weight`` float8 with ``weight_scale``, one number, or ``weight_scale_inv``, one per block of
``weight_block_size``; in spite of its name values are multiplied by it.

Inputs that a format would round to int8 stay as they are, which is more accurate. Inputs rounded to float8 row by row
are ``KernelFormat.activations``; with scales of blocks they are not rounded. Scales of inputs that were measured
beforehand are refused.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import ml_dtypes
import numpy as np

from ...models.quantized import FP8, KernelFormat
from ..errors import CheckpointError
from ..packing import columns_last, unpack_words
from ..quantize import Kernel
from ..source import TensorSource
from .reader import Matrix, Reader, require

_NAME = "compressed-tensors"
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_STATIC = (
    "it rounds inputs with scales measured beforehand, which is not supported; use a checkpoint with dynamic "
    "activation scales or with quantised weights only"
)


@dataclasses.dataclass(frozen=True)
class _Scheme:
    """How one group of matrices is stored."""

    bits: int
    storage: str
    strategy: str  # "tensor", "channel", "group" or "block"
    group: int = 0  # rows; of a block too
    block: int = 1  # outputs of a block
    packed: bool = False
    symmetric: bool = True
    activations: str = ""
    scale: str = "weight_scale"  # name of the scale


def open_compressed_tensors(source: TensorSource, config: dict[str, Any]) -> Reader:
    for key in ("sparsity_config", "transform_config", "kv_cache_scheme"):
        value = config.get(key)
        if value and not (isinstance(value, dict) and value.get("format") == "dense"):
            raise CheckpointError(f"{_NAME}: {key} is not supported; use a checkpoint without it")
    rules = []
    for name, group in (config.get("config_groups") or {}).items():
        scheme = _read_scheme(f"{_NAME}, {name}", group, config.get("format"))
        rules += [(target, scheme) for target in group.get("targets") or ["Linear"]]
    if not rules:
        raise CheckpointError(
            f"{_NAME}: quantization_config has no config_groups; use the config.json of these weights"
        )
    rules.sort(key=lambda rule: rule[0] == "Linear")  # names before the class that all have

    def scheme_of(name: str) -> _Scheme:
        for target, scheme in rules:
            if target in ("Linear", name) or (
                target.startswith("re:") and re.match(target.removeprefix("re:"), name)
            ):
                return scheme
        raise CheckpointError(f"{_NAME}: no target of quantization_config is the quantised matrix {name!r}")

    reader = _Scaled(source)
    for name in reader.names("weight_scale"):
        reader.add(name, scheme_of(name))
    return reader


def _read_scheme(where: str, group: dict[str, Any], default_format: str | None) -> _Scheme:
    weights: dict[str, Any] = group.get("weights") or {}
    inputs: dict[str, Any] = group.get("input_activations") or {}
    form = require(where, {"format": group.get("format") or default_format}, "format", _FORMATS)
    kind = require(where, weights, "type", ("int", "float"), "int")
    bits = require(
        where, weights, "num_bits", (8,) if kind == "float" or form != "pack-quantized" else (4, 8)
    )
    if group.get("output_activations") or (inputs and inputs.get("dynamic") is not True):
        raise CheckpointError(f"{where}: {_STATIC}")
    strategies = ("tensor", "channel", "group", "block")
    size = weights.get("group_size") or -1
    strategy = weights.get("strategy") or ("tensor" if size == -1 else "group")
    require(where, {"strategy": strategy}, "strategy", strategies)
    structure, block = weights.get("block_structure"), 1
    if strategy == "block":
        parts = structure.split("x") if isinstance(structure, str) else structure or ()
        if len(parts) != 2:
            raise CheckpointError(f"{where}: block_structure is {structure!r}; it must be two numbers")
        block, size = map(int, parts)
    symmetric = require(where, weights, "symmetric", (True,) if kind == "float" else (True, False), True)
    fp8_inputs = kind == "float" and strategy in ("tensor", "channel") and bool(inputs)
    if fp8_inputs:
        require(where, inputs, "type", ("float",))
        require(where, inputs, "strategy", ("token",))
    return _Scheme(
        bits,
        FP8 if kind == "float" else f"int{bits}",
        strategy,
        size if strategy in ("group", "block") else 0,
        block,
        form == "pack-quantized",
        symmetric,
        FP8 if fp8_inputs else "",
    )


def open_float8(source: TensorSource, config: dict[str, Any]) -> Reader:
    if config.get("activation_scheme", "dynamic") != "dynamic":
        raise CheckpointError(f"fp8: {_STATIC}")
    require("fp8", config, "fmt", ("e4m3",), "e4m3")
    size = config.get("weight_block_size")
    if size is not None and (not isinstance(size, list | tuple) or len(size) != 2):
        raise CheckpointError(f"fp8: weight_block_size is {size!r}; it must be two numbers")
    reader = _Scaled(source)
    for scale in ("weight_scale_inv", "weight_scale"):
        for name in reader.names(scale):
            if size:
                scheme = _Scheme(8, FP8, "block", size[1], size[0], scale=scale)
            else:
                several = np.prod(reader.shapes[f"{name}.{scale}"], dtype=int) > 1
                strategy = "channel" if several else "tensor"
                scheme = _Scheme(8, FP8, strategy, activations=FP8, scale=scale)
            reader.add(name, scheme)
    return reader


class _Scaled(Reader):
    """Matrices ``[O, I]`` with a scale beside them, each of its scheme."""

    def __init__(self, source: TensorSource):
        super().__init__(source)
        self._schemes: dict[str, _Scheme] = {}

    def add(self, name: str, scheme: _Scheme) -> None:
        """Takes in one matrix. Raises CheckpointError if its tensors are not those of the scheme."""
        self._schemes[name] = scheme
        if self.has(name, "input_scale"):
            raise CheckpointError(f"tensor '{name}.input_scale': {_STATIC}")
        if scheme.packed:
            columns, rows = (int(n) for n in self.part(name, "weight_shape", (2,)))
            self.part(name, "weight_packed", (columns, -(-rows * scheme.bits // 32)))
        else:
            weight = self.part(name, "weight")
            if weight.ndim != 2 or weight.dtype != np.dtype(_numpy(scheme.storage)):
                raise CheckpointError(
                    f"tensor '{name}.weight' is {weight.dtype} {weight.shape}; its quantization_config says it is a "
                    f"matrix of {scheme.storage}: use the config.json that belongs to these weights"
                )
            columns, rows = weight.shape
        groups = len(self._scale(name, columns, rows))
        if not scheme.symmetric:
            self._zeros(name, columns, groups)
        whole = not scheme.group or rows % scheme.group == 0
        if self.has(name, "weight_g_idx"):
            index = self.part(name, "weight_g_idx", (rows,))
            whole = whole and np.array_equal(index, np.arange(rows) // (scheme.group or rows))
        group = scheme.group if scheme.group and scheme.group < rows else 0
        activations = "" if group or not whole else scheme.activations
        fmt = KernelFormat(scheme.storage, group, not scheme.symmetric, activations) if whole else None
        self.matrices[name] = Matrix((columns, rows), fmt)

    def _scale(self, name: str, columns: int, rows: int) -> np.ndarray:
        """``[G, O]`` float32; of blocks that do not divide the rows, the last group is smaller."""
        scheme = self._schemes[name]
        groups = -(-rows // scheme.group) if scheme.group else 1
        scale = self.part(name, scheme.scale)
        if scheme.strategy == "tensor":
            if scale.size != 1:
                raise CheckpointError(
                    f"tensor '{name}.{scheme.scale}' has shape {scale.shape}, not one number"
                )
            return np.full((1, columns), scale.reshape(()), np.float32)
        if scheme.strategy == "channel" and scale.shape == (columns,):
            scale = scale[:, None]
        blocks = -(-columns // scheme.block)
        if scale.shape != (blocks, groups):
            raise CheckpointError(
                f"tensor '{name}.{scheme.scale}' has shape {scale.shape}, the quantised matrix needs "
                f"{(blocks, groups)}; use the config.json that belongs to these weights"
            )
        wide = np.repeat(scale.astype(np.float32), scheme.block, axis=0)[:columns]
        return np.ascontiguousarray(wide.T)

    def _zeros(self, name: str, columns: int, groups: int) -> np.ndarray:
        """``[G, O]`` float32."""
        scheme = self._schemes[name]
        if scheme.packed:
            words = self.part(name, "weight_zero_point", (-(-columns * scheme.bits // 32), groups))
            zeros = unpack_words(words, scheme.bits, 0)[:columns].astype(np.float32) - (
                1 << (scheme.bits - 1)
            )
        else:
            per_column = () if scheme.strategy == "tensor" else (columns, groups)
            zeros = self.part(name, "weight_zero_point", per_column or None).astype(np.float32)
            zeros = np.broadcast_to(zeros.reshape(per_column or (1, 1)), (columns, groups))
        return np.ascontiguousarray(zeros.T)

    def _numbers(self, name: str) -> np.ndarray:
        """``[I, O]`` int8 or float8."""
        scheme = self._schemes[name]
        if not scheme.packed:
            return columns_last(self.part(name, "weight"))
        words = np.ascontiguousarray(self.part(name, "weight_packed").T)
        unsigned = unpack_words(words, scheme.bits, 0)[: self.matrices[name].shape[1]]
        return (unsigned - np.uint8(1 << (scheme.bits - 1))).view(np.int8)

    def kernel(self, name: str) -> Kernel:
        matrix = self.matrices[name]
        assert matrix.format is not None, f"{name} has no format"
        scale = self._scale(name, *matrix.shape)
        offset = -self._zeros(name, matrix.shape[0], len(scale)) * scale if matrix.format.offset else None
        return self._numbers(name).astype(_numpy(matrix.format.storage), copy=False), scale, offset

    def values(self, name: str) -> np.ndarray:
        (columns, rows), scheme = self.matrices[name].shape, self._schemes[name]
        index = np.arange(rows) // (scheme.group or rows)
        if self.has(name, "weight_g_idx"):
            index = self.part(name, "weight_g_idx")
        numbers, scale = self._numbers(name).astype(np.float32), self._scale(name, columns, rows)
        if not scheme.symmetric:
            numbers -= self._zeros(name, columns, len(scale))[index]
        return numbers * scale[index]


def _numpy(storage: str) -> Any:
    return {"int4": ml_dtypes.int4, "int8": np.int8, FP8: ml_dtypes.float8_e4m3fn}[storage]
