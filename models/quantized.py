"""Weight-only quantised kernels: one form for every checkpoint format, and the product with it.

A kernel ``[..., I, O]`` of small numbers has a scale ``[..., G, O]``, one for each of G groups of I/G input rows (G is
1 when all rows share it), and for some formats an offset of the same shape: value = stored * scale + offset. Scales and
offsets are float32, also in a bfloat16 model: so every format on disk (scales in float16, bfloat16 or float32, integer
zero points) is kept exactly. At a group of 64 it costs 0.25 bits a weight more than scales of 16 bits.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxsched.pallas_kernels.products import Stored, quantized_matmul

STORAGE = {"int8": 8, "int4": 4, "float8_e4m3fn": 8}
"""Storage dtypes and their bits."""

FP8 = "float8_e4m3fn"
_FP8_MAX = 448.0
_SPLIT = 254.0  # a rest of half a step, in steps of int8
# Rows from which on, on CUDA, it is better to write the values out once (4.5 bytes a weight) and let XLA's product read
# them: ours converts a weight again for each 128 rows. Reckoned for an H200, not measured.
_MANY_ROWS = 512
_MAX_INT32_ROWS = (2**31 - 1) // (128 * 128)  # products of int8 that an int32 can sum


@dataclasses.dataclass(frozen=True)
class KernelFormat:
    """How a kernel is stored. Static and hashable: part of the module graph and of every program's key.

    Raises ValueError for a combination that has no meaning.
    """

    storage: str  # one of STORAGE
    group: int = 0  # input rows that share a scale; 0 = all of them
    offset: bool = False  # value = stored * scale + offset, else stored * scale; of integers
    activations: str = ""  # "float8_e4m3fn": inputs are quantised too, row by row; "": they are not

    def __post_init__(self) -> None:
        if self.storage not in STORAGE:
            raise ValueError(f"kernel storage {self.storage!r} is not one of {', '.join(STORAGE)}")
        if isinstance(self.group, bool) or not isinstance(self.group, int) or self.group < 0:
            raise ValueError(f"kernel group is {self.group!r}; it must be 0 (all rows) or a number of rows")
        if self.offset and self.storage == FP8:
            raise ValueError("offsets go with integers, not with float8")
        if self.activations not in ("", FP8):
            raise ValueError(f"activations {self.activations!r} are not supported; use '' or {FP8!r}")
        if self.activations and (self.storage != FP8 or self.group or self.offset):
            raise ValueError(
                f"{FP8} activations go with {FP8} kernels of one scale per output column, not with {self}"
            )

    def groups(self, width_in: int) -> int:
        """G for a kernel of ``width_in`` rows. Raises ValueError if the groups do not fill them."""
        if not self.group:
            return 1
        if width_in % self.group:
            raise ValueError(f"{width_in} input rows are not made of groups of {self.group}")
        return width_in // self.group

    def nbytes(self, width_in: int, width_out: int) -> int:
        """Bytes on the device of one kernel with its scales and offsets."""
        scales = self.groups(width_in) * width_out * 4 * (2 if self.offset else 1)
        return width_in * width_out * STORAGE[self.storage] // 8 + scales


def multiplies_fp8(device: jax.Device) -> bool:
    """Whether the device has instructions for products of float8: NVIDIA Ada (sm_89), Hopper (sm_90) and newer.

    Elsewhere ``activations`` costs accuracy and gives nothing: load the kernel with ``activations=""``.
    """
    try:
        capability = float(getattr(device, "compute_capability", 0) or 0)
    except ValueError:  # AMD names an architecture
        return False
    return device.platform in ("gpu", "cuda") and capability >= 8.9


def dequantize(
    kernel: Array, scale: Array, offset: Array | None, fmt: KernelFormat, dtype: Any
) -> Float[Array, "*B I O"]:
    """The values ``[..., I, O]`` of a kernel ``[..., I, O]`` with scale and offset ``[..., G, O]``.

    Computed in float32 and rounded once, to ``dtype``. Raises ValueError where the shapes are not those of ``fmt``.
    """
    _check(kernel, scale, offset, fmt)
    return Stored(kernel, scale, offset).values(dtype)


def matmul(
    x: Float[Array, "T I"],
    kernel: Array,
    scale: Array,
    offset: Array | None,
    fmt: KernelFormat,
    dtype: Any = None,
) -> Float[Array, "T O"]:
    """``x @ dequantize(kernel)``, of ``dtype`` (None: that of ``x``), computed in the way that suits the device.

    With ``fmt.activations`` each row of ``x`` is first rounded to float8 with a scale of its own, on every device.
    Raises ValueError where the shapes are not those of ``fmt``.
    """
    _check(kernel, scale, offset, fmt)
    if kernel.ndim != 2:
        raise ValueError(f"a product needs a kernel [I, O], not one of shape {kernel.shape}")
    out = jnp.dtype(dtype or x.dtype)
    if fmt.activations:
        y = _fp8_product(x, kernel) * scale
    elif not fmt.group:
        y = jax.lax.platform_dependent(x, kernel, cpu=_raw_on_cpu, default=_raw_product) * scale
        if offset is not None:
            y = y + jnp.sum(x.astype(jnp.float32), axis=-1, keepdims=True) * offset
    else:
        stored = Stored(kernel, scale, offset)
        y = quantized_matmul(x, stored, dtype=out, most_rows=_MANY_ROWS, otherwise=_by_xla)
    return y.astype(out)


def _check(kernel: Array, scale: Array, offset: Array | None, fmt: KernelFormat) -> None:
    wanted = (*kernel.shape[:-2], fmt.groups(kernel.shape[-2]), kernel.shape[-1])
    if kernel.dtype != jnp.dtype(fmt.storage) or scale.shape != wanted:
        raise ValueError(
            f"a kernel {kernel.shape} of {fmt} has dtype {fmt.storage} and scales {wanted}, "
            f"not {kernel.dtype} and {scale.shape}"
        )
    if (offset is not None) != fmt.offset or (offset is not None and offset.shape != wanted):
        found = None if offset is None else offset.shape
        raise ValueError(f"a kernel of {fmt} has offsets {wanted if fmt.offset else None}, not {found}")


def _dot(a: Array, b: Array) -> Array:
    # float32 means float32: without this a GPU multiplies in TF32.
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def _raw_product(x: Array, kernel: Array) -> Array:
    """``x @ stored`` in float32. On a GPU, XLA converts within the product (seen in programs compiled for sm_90)."""
    return _dot(x, kernel.astype(x.dtype))  # int8, int4 and e4m3 lose nothing in bfloat16 and float16


def _by_xla(x: Array, stored: Stored) -> Array:
    """With scales of groups: on a CPU, and on a GPU where there is no kernel for it."""
    operands = x, stored.kernel, stored.scale, stored.offset
    if 2 * x.shape[0] >= stored.kernel.shape[0] // stored.scale.shape[0]:
        return _dequantized(*operands)
    return jax.lax.platform_dependent(*operands, cuda=_partial_sums, default=_dequantized)


def _dequantized(x: Array, kernel: Array, scale: Array, offset: Array | None) -> Array:
    fmt = KernelFormat(kernel.dtype.name, kernel.shape[0] // scale.shape[0], offset is not None)
    return _dot(x, dequantize(kernel, scale, offset, fmt, x.dtype))


def _partial_sums(x: Array, kernel: Array, scale: Array, offset: Array | None) -> Array:
    """One product per group, scaled afterwards: for few rows on a GPU.

    XLA does not fuse scales of groups into a product's operand: it writes the whole kernel out in 16 bits and reads it
    again, 4 bytes a weight. Here the conversion is fused and the partial sums ``[G, T, O]`` are written instead, 8 T
    bytes for a group's weights of a column: fewer while T < group / 2.
    """
    rows, groups = x.shape[0], scale.shape[0]
    if rows == 1:  # XLA takes the product of one row apart, into float32 arrays as large as the kernel
        x = jnp.concatenate([x, jnp.zeros_like(x)])
    parts = x.reshape(x.shape[0], groups, -1)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    sums = jnp.einsum(
        "tgi,gio->gto",
        parts,
        kernel.reshape(groups, -1, kernel.shape[1]).astype(x.dtype),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    y = jnp.sum(sums * scale[:, None, :], axis=0)
    if offset is not None:
        y = y + jnp.dot(
            jnp.sum(parts.astype(jnp.float32), axis=-1), offset, precision=jax.lax.Precision.HIGHEST
        )
    return y[:rows]


def _raw_on_cpu(x: Array, kernel: Array) -> Array:
    """``x @ stored`` in float32 on a CPU, where XLA would write a converted kernel out and read it again.

    Of integers: each input is split into three int8 numbers (23 bits below the row's largest value), which the CPU's
    int8 instructions multiply. Those sums are exact, so a row's result does not depend on the rows beside it. About as
    fast as float32 weights for one row, faster for several (scripts/bench_quantized.py).
    """
    x = x.astype(jnp.float32)
    if kernel.dtype == jnp.dtype(FP8) or kernel.shape[0] > _MAX_INT32_ROWS:
        return _dot(x, kernel.astype(jnp.float32))
    step = _row_scale(x, 127.0)
    high = jnp.round(x / step)
    rest = (x / step - high) * _SPLIT
    middle = jnp.round(rest)
    low = jnp.round((rest - middle) * _SPLIT)
    pieces = jnp.concatenate([high, middle, low]).astype(jnp.int8)
    sums = jnp.dot(pieces, kernel.astype(jnp.int8), preferred_element_type=jnp.int32).astype(jnp.float32)
    high, middle, low = jnp.split(sums, 3)
    return (high + (middle + low / _SPLIT) / _SPLIT) * step


def _row_scale(x: Array, largest: float) -> Array:
    """``[T, 1]``: what maps each row's largest magnitude to ``largest``; 1 for a row of zeros."""
    top = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    return jnp.where(top == 0, 1.0, top / largest)  # what is not finite stays so


def _fp8_product(x: Array, kernel: Array) -> Array:
    """``round_to_fp8(x) @ stored`` in float32, native where XLA multiplies float8 (CUDA)."""
    wide = x.astype(jnp.float32)
    step = _row_scale(wide, _FP8_MAX)
    rounded = jnp.clip(wide / step, -_FP8_MAX, _FP8_MAX).astype(kernel.dtype)

    def native(x: Array, kernel: Array) -> Array:
        return jnp.dot(x, kernel, preferred_element_type=jnp.float32)

    def emulated(x: Array, kernel: Array) -> Array:
        return _dot(x.astype(jnp.float32), kernel.astype(jnp.float32))

    return jax.lax.platform_dependent(rounded, kernel, cuda=native, default=emulated) * step
