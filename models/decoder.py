"""One dense decoder with options. It knows nothing of pages: the caller says how attention is computed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxsched.pallas_kernels.rotary import rotate

from .config import ModelConfig


@runtime_checkable
class AttendHeads(Protocol):
    """Attention that rotates itself, so that rotating and writing K and V can be one kernel."""

    def heads(self, context: Any, heads: Array, cos: Array, sin: Array, cache: Any) -> tuple[Array, Any]:
        """``heads [T,H+2K,D]``: queries, keys and values as projected; ``cos``, ``sin`` float32 ``[T,1,D/2]``."""


Attend = Callable[[Any, Array, Array, Array, Any], tuple[Array, Any]] | AttendHeads
"""``attend(context, q [T,H,D], k [T,K,D], v [T,K,D], cache) -> ([T,H,D], cache)``, q and k already rotated; or an
object with ``heads``. ``context`` is whatever all layers share (positions, tables), ``cache`` what one layer remembers.
"""


def _precision(dtype: jnp.dtype) -> jax.lax.Precision | None:
    # float32 means float32: without this a GPU multiplies in TF32.
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


class Linear(nnx.Module):
    """``x [T, in] -> [T, out]`` with a kernel ``[in, out]`` and an optional bias."""

    def __init__(self, width_in: int, width_out: int, bias: bool, dtype: jnp.dtype):
        self.kernel = nnx.Param(jnp.zeros((width_in, width_out), dtype))
        self.bias = nnx.Param(jnp.zeros((width_out,), dtype)) if bias else None

    def __call__(self, x: Float[Array, "T I"]) -> Float[Array, "T O"]:
        y = jnp.dot(x, self.kernel[...], precision=_precision(x.dtype))
        return y if self.bias is None else y + self.bias[...]


class RMSNorm(nnx.Module):
    """Root-mean-square norm (Zhang & Sennrich 2019), computed in float32."""

    def __init__(self, width: int, eps: float, dtype: jnp.dtype):
        self.scale = nnx.Param(jnp.ones((width,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return self.scale[...] * wide.astype(x.dtype)


class SelfAttention(nnx.Module):
    def __init__(self, c: ModelConfig, dtype: jnp.dtype):
        self.heads, self.kv_heads, self.head_dim = c.num_heads, c.num_kv_heads, c.head_dim
        q = c.num_heads * c.head_dim
        self.qkv = Linear(c.hidden_size, q + 2 * c.kv_width, c.attention_bias, dtype)
        self.out = Linear(q, c.hidden_size, c.attention_bias, dtype)

    def __call__(self, x: Array, cos: Array, sin: Array, attend: Callable) -> tuple[Array, Any]:
        rows = x.shape[0]
        heads = self.qkv(x).reshape(rows, self.heads + 2 * self.kv_heads, self.head_dim)
        y, cache = attend(heads, cos, sin)
        return self.out(y.reshape(rows, -1)), cache


class Mlp(nnx.Module):
    """SwiGLU (Shazeer 2020), gate and up in one product."""

    def __init__(self, c: ModelConfig, dtype: jnp.dtype):
        self.gate_up = Linear(c.hidden_size, 2 * c.intermediate_size, c.mlp_bias, dtype)
        self.down = Linear(c.intermediate_size, c.hidden_size, c.mlp_bias, dtype)

    def __call__(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)


class Layer(nnx.Module):
    def __init__(self, c: ModelConfig, dtype: jnp.dtype):
        self.attn_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype)
        self.attention = SelfAttention(c, dtype)
        self.mlp_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype)
        self.mlp = Mlp(c, dtype)

    def __call__(self, x: Array, cos: Array, sin: Array, attend: Callable) -> tuple[Array, Any]:
        y, cache = self.attention(self.attn_norm(x), cos, sin, attend)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), cache


@partial(jax.jit, static_argnums=(0, 1))
def _run_layer(
    graph: nnx.GraphDef,
    attend: Attend,
    params: Any,
    x: Array,
    cos: Array,
    sin: Array,
    context: Any,
    cache: Any,
) -> tuple[Array, Any]:
    """One layer. Jitted so that equal layers are traced once; XLA inlines the calls, so the program stays unrolled."""
    layer = nnx.merge(graph, params)

    def attend_heads(heads: Array, cos: Array, sin: Array) -> tuple[Array, Any]:
        if isinstance(attend, AttendHeads):
            return attend.heads(context, heads, cos, sin, cache)
        queries, kv_heads = layer.attention.heads, layer.attention.kv_heads
        q, k, v = jnp.split(heads, (queries, queries + kv_heads), axis=1)
        return attend(context, rotate(q, cos, sin), rotate(k, cos, sin), v, cache)

    return layer(x, cos, sin, attend_heads)


class Embedding(nnx.Module):
    def __init__(self, c: ModelConfig, dtype: jnp.dtype):
        self.embedding = nnx.Param(jnp.zeros((c.vocab_size, c.hidden_size), dtype))


class Decoder(nnx.Module):
    """Decoder-only transformer. Parameters are zeros until a loader fills them; see ``jaxsched.weights``."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype = jnp.dtype("float32")):
        self.config = config
        self.embed = Embedding(config, dtype)
        self.layers = nnx.List([Layer(config, dtype) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.head = (
            None
            if config.tie_word_embeddings
            else Linear(config.hidden_size, config.vocab_size, False, dtype)
        )

    def __call__(
        self,
        tokens: Int[Array, "T"],
        positions: Int[Array, "T"],
        attend: Attend,
        context: Any,
        caches: list[Any],
        trace: list[Array] | None = None,
    ) -> tuple[Float[Array, "T E"], list[Any]]:
        """Hidden states before the final norm, and each layer's new cache.

        ``trace``, a list, collects the embedding and each layer's output.
        """
        x = self.embed.embedding[...][tokens]
        inv_freq, scale = self.config.rope.frequencies(self.config.head_dim)
        angles = positions[:, None, None].astype(jnp.float32) * inv_freq
        cos, sin = jnp.cos(angles) * scale, jnp.sin(angles) * scale
        if trace is not None:
            trace.append(x)
        out = []
        for layer, cache in zip(self.layers, caches, strict=True):
            graph, params = nnx.split(layer)
            x, cache = _run_layer(graph, attend, nnx.as_pure(params), x, cos, sin, context, cache)
            out.append(cache)
            if trace is not None:
                trace.append(x)
        return x, out

    def logits(self, hidden: Float[Array, "R E"]) -> Float[Array, "R V"]:
        """float32 scores over the vocabulary for the given rows of hidden states."""
        x = self.norm(hidden)
        precision = _precision(x.dtype)
        if self.head is None:
            table = self.embed.embedding[...]
            return jnp.einsum("re,ve->rv", x, table, precision=precision, preferred_element_type=jnp.float32)
        return jnp.dot(x, self.head.kernel[...], precision=precision, preferred_element_type=jnp.float32)
