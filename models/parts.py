"""What layers are made of: products, norms, the MLP."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from .config import ModelConfig

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


def precision(dtype: jnp.dtype) -> jax.lax.Precision | None:
    """float32 means float32: without this a GPU multiplies in TF32."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


class Linear(nnx.Module):
    """``x [T, in] -> [T, out]`` with a kernel ``[in, out]`` and an optional bias."""

    def __init__(self, width_in: int, width_out: int, bias: bool, dtype: jnp.dtype):
        self.kernel = nnx.Param(jnp.zeros((width_in, width_out), dtype))
        self.bias = nnx.Param(jnp.zeros((width_out,), dtype)) if bias else None

    def __call__(self, x: Float[Array, "T I"]) -> Float[Array, "T O"]:
        y = jnp.dot(x, self.kernel[...], precision=precision(x.dtype))
        return y if self.bias is None else y + self.bias[...]


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

    def __init__(self, c: ModelConfig, width: int, dtype: jnp.dtype):
        self.gated, self.activation = c.gated, c.activation
        self.gate_up = Linear(c.hidden_size, width * (2 if c.gated else 1), c.mlp_bias, dtype)
        self.down = Linear(width, c.hidden_size, c.mlp_bias, dtype)

    def __call__(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        return self.down(activate(self.gate_up(x), self.activation, self.gated))


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
