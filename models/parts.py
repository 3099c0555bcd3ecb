"""What layers are made of: products, norms, the MLP."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from .config import ModelConfig
from .quantized import KernelFormat, matmul

Formats = Mapping[str, KernelFormat]
"""How kernels are stored that are quantised: by path, such as "layers.0.attention.qkv", or by the end of one."""

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


def precision(dtype: jnp.dtype) -> jax.lax.Precision | None:
    """float32 means float32: without this a GPU multiplies in TF32."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


class Kernel(nnx.Module):
    """A matrix ``[in, out]``, or a stack of them ``[N, in, out]``; quantised if it has a format."""

    def __init__(
        self, shape: tuple[int, ...], dtype: jnp.dtype, fmt: KernelFormat | None = None, bias: bool = False
    ):
        *outer, width_in, width_out = shape
        self.fmt = fmt
        self.kernel = nnx.Param(jnp.zeros(shape, dtype if fmt is None else fmt.storage))
        scales = None if fmt is None else (*outer, fmt.groups(width_in), width_out)
        self.scale = None if scales is None else nnx.Param(jnp.ones(scales, jnp.float32))
        self.offset = nnx.Param(jnp.zeros(scales, jnp.float32)) if scales and fmt and fmt.offset else None
        self.bias = nnx.Param(jnp.zeros((width_out,), dtype)) if bias else None

    def arrays(self) -> tuple[Array, Array | None, Array | None]:
        """What is stored, scales and offsets, where there are any."""
        scale, offset = (None if x is None else x[...] for x in (self.scale, self.offset))
        return self.kernel[...], scale, offset


@dataclasses.dataclass(frozen=True)
class AdapterShape:
    """Room for low-rank adapters beside one kernel."""

    count: int  # N, adapters
    width: int  # columns of A of one adapter: its largest rank, for each checkpoint tensor that is fused here


class Linear(Kernel):
    """``x [T, in] -> [T, out]`` with a kernel ``[in, out]``, an optional bias and perhaps low-rank adapters."""

    def __init__(
        self, width_in: int, width_out: int, bias: bool, dtype: jnp.dtype, fmt: KernelFormat | None = None
    ):
        super().__init__((width_in, width_out), dtype, fmt, bias)
        self.adapters: AdapterShape | None = None

    def add_adapters(self, shape: AdapterShape, dtype: jnp.dtype) -> None:
        """Makes room for N adapters (LoRA, Hu et al. 2021): A ``[in, N*W]`` and B ``[N*W, out]``, zeros."""
        width_in, width_out = self.kernel[...].shape
        self.adapters = shape
        self.lora_a = nnx.Param(jnp.zeros((width_in, shape.count * shape.width), dtype))
        self.lora_b = nnx.Param(jnp.zeros((shape.count * shape.width, width_out), dtype))

    def __call__(self, x: Float[Array, "T I"], adapter: Int[Array, "T"] | None = None) -> Float[Array, "T O"]:
        """``adapter``: of each row, 1..N; 0 is none. None: of no row, and nothing of adapters is computed."""
        kernel, scale, offset = self.arrays()
        if self.fmt is None or scale is None:
            y = jnp.dot(x, kernel, precision=precision(x.dtype))
        else:
            y = matmul(x, kernel, scale, offset, self.fmt)
        y = y if self.bias is None else y + self.bias[...]
        return y if adapter is None or self.adapters is None else y + self._adapted(x, adapter)

    def _adapted(self, x: Float[Array, "T I"], adapter: Int[Array, "T"]) -> Float[Array, "T O"]:
        """What each row's adapter adds: ``((x A) masked) B`` with the A and B of all adapters side by side.

        Punica (Chen et al. 2023) and S-LoRA (Sheng et al. 2023) gather each row's weights and need kernels for it.
        Here all rows meet all adapters in two plain products, and a row keeps the columns of its own. That costs
        N times the arithmetic of one adapter, and reads each adapter once, as a gather does when all are in use: for
        a handful of adapters of rank 16 it is a few per cent of the layer. Masked, not multiplied by 0, so that no
        row can get what is infinite in another's.
        """
        assert self.adapters is not None
        count, exact = self.adapters.count, precision(x.dtype)
        inner = jnp.dot(x, self.lora_a[...], precision=exact).reshape(x.shape[0], count, -1)
        own = adapter[:, None, None] == jnp.arange(1, count + 1, dtype=adapter.dtype)[None, :, None]
        inner = jnp.where(own, inner, 0).reshape(x.shape[0], -1)
        return jnp.dot(inner, self.lora_b[...], precision=exact)


class RMSNorm(nnx.Module):
    """Root-mean-square norm (Zhang & Sennrich 2019) over the last axis, computed in float32.

    ``offset`` is added to the weights, in float32 (Gemma).
    """

    def __init__(self, width: int, eps: float, offset: float, dtype: jnp.dtype):
        self.scale = nnx.Param(jnp.ones((width,), dtype))
        self.eps, self.offset = eps, offset

    def __call__(self, x: Float[Array, "*T E"]) -> Float[Array, "*T E"]:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        if self.offset:
            return (wide * (self.scale[...].astype(jnp.float32) + self.offset)).astype(x.dtype)
        return self.scale[...] * wide.astype(x.dtype)


class LayerNorm(nnx.Module):
    """Layer norm with bias (Ba et al. 2016), computed in float32."""

    def __init__(self, width: int, eps: float, dtype: jnp.dtype):
        self.scale = nnx.Param(jnp.ones((width,), dtype))
        self.bias = nnx.Param(jnp.zeros((width,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * self.scale[...] + self.bias[...]).astype(x.dtype)


def new_norm(c: ModelConfig, dtype: jnp.dtype) -> RMSNorm | LayerNorm:
    """A norm of the residual stream."""
    if c.norm == "layer":
        return LayerNorm(c.hidden_size, c.norm_eps, dtype)
    return RMSNorm(c.hidden_size, c.norm_eps, c.norm_offset, dtype)


class Mlp(nnx.Module):
    """An MLP of ``width``; gated (Shazeer 2020): gate and up are one product."""

    def __init__(self, c: ModelConfig, width: int, dtype: jnp.dtype, formats: Formats):
        self.gated, self.activation = c.gated, c.activation
        inner = width * (2 if c.gated else 1)
        self.gate_up = Linear(c.hidden_size, inner, c.mlp_bias, dtype, formats.get("gate_up"))
        self.down = Linear(width, c.hidden_size, c.mlp_bias, dtype, formats.get("down"))

    def __call__(self, x: Float[Array, "T E"], adapter: Int[Array, "T"] | None = None) -> Float[Array, "T E"]:
        return self.down(activate(self.gate_up(x, adapter), self.activation, self.gated), adapter)


def below(formats: Formats, path: str) -> Formats:
    """The formats of what is under ``path``, by the rest of their paths."""
    return {key.removeprefix(path): fmt for key, fmt in formats.items() if key.startswith(path)}


def activate(x: Float[Array, "*T F"], activation: str, gated: bool) -> Float[Array, "*T G"]:
    """The activation, of the first half times the second if ``gated``."""
    act = ACTIVATIONS[activation]
    if not gated:
        return act(x)
    gate, up = jnp.split(x, 2, axis=-1)
    return act(gate) * up


def soft_cap(scores: Array, cap: float | None) -> Array:
    """``cap * tanh(scores / cap)`` (Gemma 2)."""
    return scores if cap is None else cap * jnp.tanh(scores / cap)
