"""Which kernels stay or become quantised, and how each parameter is made from its tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from ..models.quantized import KernelFormat
from ..models.weights import Rule
from .build import build, floating
from .errors import CheckpointError
from .quantize import FLOAT8, INT4, INT8, Kernel, common_format, join, quantize
from .source import QuantizedSource, TensorSource

METHODS: dict[str, KernelFormat] = {"int8": INT8, "int4": INT4, "fp8": FLOAT8}
"""What ``quantization`` makes of the kernels of layers when they are loaded."""
KEEP, DEQUANTIZE = "keep", "dequantize"
QUANTIZATIONS = (*METHODS, KEEP, DEQUANTIZE)


def plan(
    source: TensorSource, table: Mapping[str, Rule], quantization: str | None, *, fp8: bool = False
) -> dict[str, KernelFormat]:
    """Path of each quantised kernel ("layers.0.attention.qkv") -> its format.

    Kernels of layers only: embeddings, output head and routers stay as they are. ``quantization`` is one of METHODS;
    "keep" takes the kernels as the checkpoint has them, where it has them quantised in a form that can be multiplied;
    "dequantize" makes floating-point kernels of all; None is "keep" for a checkpoint that says it is quantised.
    ``fp8``: the device multiplies float8, so that inputs are rounded too where a format says so.

    Raises CheckpointError for a method that contradicts what the checkpoint is, and widths that groups do not fill.
    """
    stored = source.formats() if isinstance(source, QuantizedSource) else {}
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization {quantization!r} is unknown; known: {', '.join(QUANTIZATIONS)}")
    native = isinstance(source, QuantizedSource) and source.declared
    if native and quantization in METHODS:
        raise CheckpointError(
            f"quantization {quantization!r} was asked for a checkpoint that is quantised already; leave it out, or "
            'take an unquantised checkpoint (quantization="dequantize" loads this one in floating point)'
        )
    if quantization == KEEP and not stored:
        raise CheckpointError(
            'quantization "keep" was asked, but the checkpoint has no kernels in a format that can be kept; drop it'
        )
    if quantization == DEQUANTIZE or (quantization is None and not native):
        return {}
    formats = {}
    for path, rule in table.items():
        if (name := kernel_path(path)) is None:
            continue
        fmt = METHODS[quantization] if quantization in METHODS else _stored_format(rule, stored)
        if fmt is not None:
            fmt = fmt if fp8 else dataclasses.replace(fmt, activations="")
            formats[name] = _fitting(fmt, name, rule)
    return formats


def kernel_path(path: str) -> str | None:
    """The path of a kernel of a layer; None for other parameters, and for routers and gates."""
    name, _, last = path.rpartition(".")
    keep = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down", "shared.gate_up", "shared.down")
    return name if path.startswith("layers.") and last == "kernel" and name.endswith(keep) else None


def _stored_format(rule: Rule, stored: Mapping[str, KernelFormat]) -> KernelFormat | None:
    """The form that the sources of a kernel have in common; None where they have none and must be dequantised."""
    found = [stored.get(name.removesuffix(".weight")) for name in rule.sources]
    formats = [fmt for fmt in found if fmt is not None]
    if len(formats) != len(found):
        return None
    try:
        return common_format(formats, rule.shape[-2])
    except ValueError:
        return None


def _fitting(fmt: KernelFormat, name: str, rule: Rule) -> KernelFormat:
    """``fmt``, or with smaller groups where its own do not fill the kernel's rows."""
    width = rule.shape[-2]
    for group in (fmt.group, 32, 16):
        if not group or width % group == 0:
            return dataclasses.replace(fmt, group=group)
    raise CheckpointError(
        f'{name} has {width} input rows, which no groups of {fmt.group}, 32 or 16 fill; use quantization="int8", '
        "which has one scale per column"
    )


def make(
    source: TensorSource, path: str, rule: Rule, dtype: jnp.dtype, formats: Mapping[str, KernelFormat]
) -> dict[str, np.ndarray]:
    """The arrays of the parameter ``path``, by their own paths: one, or of a quantised kernel also scales and offsets.

    Raises CheckpointError naming the tensor.
    """
    name = path.removesuffix(".kernel")
    fmt = formats.get(name) if path.endswith(".kernel") else None
    if fmt is None:
        return {path: build(source, rule, dtype)}
    count = rule.stack or 1
    each = len(rule.sources) // count
    parts = [_quantized(source, rule, rule.sources[i * each : (i + 1) * each], fmt) for i in range(count)]
    arrays = zip(*parts, strict=True)
    stacked = [None if a[0] is None else np.stack(a) if rule.stack else a[0] for a in arrays]
    keys = (path, f"{name}.scale", f"{name}.offset")
    return {key: value for key, value in zip(keys, stacked, strict=True) if value is not None}


def _quantized(source: TensorSource, rule: Rule, names: tuple[str, ...], fmt: KernelFormat) -> Kernel:
    """One quantised matrix ``[I, O]``, from the tensors ``names``."""
    stored = source.formats() if isinstance(source, QuantizedSource) else {}
    linears = [name.removesuffix(".weight") for name in names]
    if isinstance(source, QuantizedSource) and all(linear in stored for linear in linears):
        kernels = [source.read_quantized(linear) for linear in linears]
        kernel, joined = join(kernels, [stored[linear] for linear in linears])
        planned = dataclasses.replace(fmt, activations=joined.activations)
        assert joined == planned, f"{names}: {joined} was planned as {planned}"
        if rule.order is None:
            return kernel
        return tuple(None if a is None else np.ascontiguousarray(a[:, rule.order]) for a in kernel)  # type: ignore
    wide = np.dtype(np.float32)
    tensors = [floating(source, name, wide) for name in names]
    try:
        return quantize(rule.matrix(tensors), fmt)
    except ValueError as error:
        raise CheckpointError(
            f"{', '.join(names)} cannot be quantised: {error}; use a sound checkpoint"
        ) from error
