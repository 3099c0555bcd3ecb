"""One parameter from its tensors: read, checked, cast, joined and transposed, with as few copies as it takes."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

from jaxsched.host_memory import empty_pages

from ..models.weights import Rule
from .errors import CheckpointError
from .source import TensorSource

_FLOATING = (np.float16, np.float32, np.float64, ml_dtypes.bfloat16)
_CHUNK = 1 << 16  # numbers looked at together: their flags stay in a core's cache
_ROWS = 8  # rows transposed together: whole cache lines are written, three times as fast as row by row


def build(source: TensorSource, rule: Rule, dtype: Any) -> np.ndarray:
    """The parameter of ``rule`` as ``dtype``, in memory that no file backs.

    Raises CheckpointError as ``floating``, naming tensor and file.
    """
    dtype = np.dtype(dtype)
    result = empty_pages(rule.shape, dtype)
    count = rule.stack or 1
    each = len(rule.sources) // count
    for i in range(count):
        _fill(result[i] if rule.stack else result, source, rule, rule.sources[i * each : (i + 1) * each])
    return result


def floating(source: TensorSource, name: str, dtype: Any) -> np.ndarray:
    """The tensor ``name`` as ``dtype``.

    Raises CheckpointError if it is not floating point, has NaN or infinity, or has numbers that ``dtype`` cannot hold.
    """
    return _read(source, name, dtype).astype(dtype, copy=False)


def largest(values: np.ndarray) -> Any:
    """The largest magnitude, NaN if there is one. 10 to 15 GB/s on one core."""
    flat = values.reshape(-1)
    if flat.dtype.itemsize == 2:  # without the sign, bits of 16-bit floats have the order of the numbers
        bits = flat.view(np.uint16)
        most = max(
            (int((bits[i : i + _CHUNK] & 0x7FFF).max()) for i in range(0, bits.size, _CHUNK)), default=0
        )
        return np.array(most, np.uint16).view(flat.dtype)
    if not flat.size:
        return flat.dtype.type(0)
    return np.maximum(flat.max(), -flat.min())


def _read(source: TensorSource, name: str, dtype: Any) -> np.ndarray:
    """The tensor as it is stored, known to be of numbers that are finite as ``dtype``."""
    tensor = source.read(name)
    if tensor.dtype not in _FLOATING:
        raise CheckpointError(
            f"{source.file_of(name)}: tensor {name!r} has dtype {tensor.dtype}; supported: float16, bfloat16, "
            "float32, float64; use an unquantized checkpoint"
        )
    most = largest(tensor)
    if not np.isfinite(most):
        raise CheckpointError(
            f"{source.file_of(name)}: tensor {name!r} has numbers that are NaN or infinite; download it again, or use "
            "a sound checkpoint"
        )
    with np.errstate(over="ignore"):
        fits = np.isfinite(most.astype(dtype))
    if not fits:
        raise CheckpointError(
            f"{source.file_of(name)}: tensor {name!r} has numbers up to {float(most):.3g}, which "
            f"{np.dtype(dtype).name} cannot hold; use bfloat16 or float32"
        )
    return tensor


def _fill(target: np.ndarray, source: TensorSource, rule: Rule, names: tuple[str, ...]) -> None:
    """Writes one matrix or vector of the parameter."""
    if rule.order is not None:
        tensors = [floating(source, name, target.dtype) for name in names]
        one = dataclasses.replace(rule, sources=names, stack=0, transpose=False)
        _put(target, one.build(tensors), rule.transpose)
        return
    begin = 0
    for name in names:
        tensor = _read(source, name, target.dtype)
        end = begin + tensor.shape[0]
        part = target[..., begin:end] if rule.transpose else target[begin:end]
        _put(part, tensor, rule.transpose)
        begin = end


def _put(target: np.ndarray, values: np.ndarray, transpose: bool) -> None:
    if not transpose:
        target[...] = values
        return
    for i in range(0, len(values), _ROWS):
        target[:, i : i + _ROWS] = values[i : i + _ROWS].T
