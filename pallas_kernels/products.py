"""Products with kernels whose numbers have scales of groups of input rows: value = stored * scale + offset.

XLA does not fuse such scales into a product on a GPU (seen in compiled programs, jax 0.12): it writes the whole kernel
out in 16 bits and reads it again. The kernel for CUDA reads what is stored.

Shapes: T rows, I and O widths, G groups of I/G input rows.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from . import tuning

IMPLEMENTATIONS = ("reference", "triton")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stored:
    """A quantised kernel ``[..., I, O]`` with scales, and perhaps offsets, ``[..., G, O]`` in float32."""

    kernel: Array
    scale: Float[Array, "*N G O"]
    offset: Float[Array, "*N G O"] | None = None

    def values(self, dtype: Any) -> Float[Array, "*N I O"]:
        """The kernel that it stands for, computed in float32 and rounded once, to ``dtype``."""
        *outer, _, columns = self.kernel.shape
        grouped = self.kernel.reshape(*outer, self.scale.shape[-2], -1, columns).astype(jnp.float32)
        values = grouped * self.scale[..., None, :].astype(jnp.float32)
        if self.offset is not None:
            values = values + self.offset[..., None, :].astype(jnp.float32)
        return values.reshape(self.kernel.shape).astype(dtype)


def quantized_matmul(
    x: Float[Array, "T I"],
    stored: Stored,
    *,
    dtype: Any = None,
    otherwise: Callable[[Array, Stored], Array] | None = None,
    most_rows: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "T O"]:
    """``x @ (kernel * scale + offset)`` of ``dtype`` (None: that of ``x``), summed in float32.

    ``implementation``: None takes the kernel on CUDA, and ``otherwise`` (None: "reference") on what else there is, for
    what the kernel cannot do, and for more than ``most_rows`` rows. "triton" runs in Pallas's interpreter on a CPU.
    Raises ValueError for an unknown one and one that cannot do this.
    """
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(
            f"quantized_matmul: implementation {implementation!r} is unknown; "
            f"known: {', '.join(IMPLEMENTATIONS)}, or None"
        )
    out = jnp.dtype(dtype or x.dtype)

    def plain(x: Array, stored: Stored) -> Array:
        return (otherwise or _reference)(x, stored).astype(out)

    if implementation == "reference":
        return _reference(x, stored).astype(out)
    family = tuning.device_family()
    many = most_rows is not None and x.shape[0] > most_rows
    if implementation is None and (family is None or many):
        return plain(x, stored)
    kernels = importlib.import_module(".triton.products", __package__)
    reason = kernels.refusal(x, stored, family)
    kernel = functools.partial(kernels.quantized_matmul, dtype=out, family=family)
    if implementation is None:
        return lax.platform_dependent(x, stored, cuda=plain if reason else kernel, default=plain)
    if reason is not None:
        raise ValueError(
            f"quantized_matmul: implementation 'triton' cannot do this: {reason}; 'reference' can"
        )
    return lax.platform_dependent(x, stored, cpu=functools.partial(kernel, interpret=True), default=kernel)


def _reference(x: Array, stored: Stored) -> Array:
    return jnp.dot(x.astype(jnp.float32), stored.values(jnp.float32), precision=lax.Precision.HIGHEST)
