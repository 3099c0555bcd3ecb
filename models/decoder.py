"""One decoder with options. It knows nothing of pages: the caller says how attention is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxsched.pallas_kernels.rotary import rotate
from jaxsched.pallas_kernels.shapes import AttentionOptions

from .config import ModelConfig
from .experts import Experts
from .parts import AdapterShape, Formats, Linear, Mlp, RMSNorm, below, new_norm, precision, soft_cap


@runtime_checkable
class AttendHeads(Protocol):
    """Attention that rotates itself, so that rotating and writing K and V can be one kernel."""

    def heads(
        self, context: Any, heads: Array, cos: Array, sin: Array, cache: Any, options: AttentionOptions
    ) -> tuple[Array, Any]:
        """``heads [T,H+2K,D]``: queries, keys and values as projected; ``cos``, ``sin`` float32 ``[T,1,D/2]``."""


Attend = Callable[[Any, Array, Array, Array, Any, AttentionOptions], tuple[Array, Any]] | AttendHeads
"""``attend(context, q [T,H,D], k [T,K,D], v [T,K,D], cache, options) -> ([T,H,D], cache)``, q and k already rotated; or
an object with ``heads``. ``context`` is whatever all layers share (positions, tables), ``cache`` what one layer
remembers, ``options`` the layer's formula.
"""


class SelfAttention(nnx.Module):
    """Projections, norms of queries and keys, and in between whatever attention the caller has."""

    def __init__(self, c: ModelConfig, index: int, dtype: jnp.dtype, formats: Formats):
        layer = c.layers[index]
        self.heads, self.kv_heads, self.head_dim = c.num_heads, c.num_kv_heads, c.head_dim
        self.clip, self.norm_all = c.clip_qkv, c.qk_norm == "all"
        scale = layer.scale or c.attention_scale or c.head_dim**-0.5
        self.options = AttentionOptions(scale, layer.window, c.attention_soft_cap)
        q = c.num_heads * c.head_dim
        self.qkv = Linear(c.hidden_size, q + 2 * c.kv_width, c.qkv_bias, dtype, formats.get("qkv"))
        self.out = Linear(q, c.hidden_size, c.out_bias, dtype, formats.get("out"))
        q_width, k_width = (q, c.kv_width) if self.norm_all else (c.head_dim, c.head_dim)
        self.q_norm = RMSNorm(q_width, c.norm_eps, c.norm_offset, dtype) if c.qk_norm else None
        self.k_norm = RMSNorm(k_width, c.norm_eps, c.norm_offset, dtype) if c.qk_norm else None

    def __call__(
        self, x: Array, cos: Array, sin: Array, attend: Callable, adapter: Array | None
    ) -> tuple[Array, Any]:
        rows = x.shape[0]
        heads = self.qkv(x, adapter).reshape(rows, self.heads + 2 * self.kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = jnp.split(heads, (self.heads, self.heads + self.kv_heads), axis=1)
            q, k = (self._normed(norm, part) for norm, part in ((self.q_norm, q), (self.k_norm, k)))
            heads = jnp.concatenate((q, k, v), axis=1)
        if self.clip is not None:
            heads = jnp.clip(heads, -self.clip, self.clip)
        y, cache = attend(heads, cos, sin, self.options)
        return self.out(y.reshape(rows, -1), adapter), cache

    def _normed(self, norm: RMSNorm, heads: Array) -> Array:
        return norm(heads.reshape(heads.shape[0], -1)).reshape(heads.shape) if self.norm_all else norm(heads)


class Layer(nnx.Module):
    """Attention and MLP, each with a norm before it, behind it, or both."""

    def __init__(self, c: ModelConfig, index: int, dtype: jnp.dtype, formats: Formats):
        before, behind = c.norms != "post", c.norms != "pre"
        self.attn_norm = new_norm(c, dtype) if before else None
        self.attention = SelfAttention(c, index, dtype, below(formats, "attention."))
        self.attn_post_norm = new_norm(c, dtype) if behind else None
        self.mlp_norm = new_norm(c, dtype) if before else None
        inner = below(formats, "mlp.")
        routed = c.layers[index].experts
        self.mlp = Experts(c, dtype, inner) if routed else Mlp(c, c.intermediate_size, dtype, inner)
        self.mlp_post_norm = new_norm(c, dtype) if behind else None
        self.parallel, self.residual_scale = c.parallel, c.residual_scale

    def __call__(
        self, x: Array, cos: Array, sin: Array, attend: Callable, adapter: Array | None = None
    ) -> tuple[Array, Any]:
        y, cache = self.attention(_maybe(self.attn_norm, x), cos, sin, attend, adapter)
        between = self._add(x, _maybe(self.attn_post_norm, y))
        z = self.mlp(_maybe(self.mlp_norm, x if self.parallel else between), adapter)
        return self._add(between, _maybe(self.mlp_post_norm, z)), cache

    def _add(self, x: Array, y: Array) -> Array:
        return x + (y if self.residual_scale == 1 else y * jnp.asarray(self.residual_scale, y.dtype))


def _maybe(norm: nnx.Module | None, x: Array) -> Array:
    return x if norm is None else norm(x)


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
    adapter: Array | None,
) -> tuple[Array, Any]:
    """One layer. Jitted so that equal layers are traced once; XLA inlines the calls, so the program stays unrolled."""
    layer = nnx.merge(graph, params)

    def attend_heads(heads: Array, cos: Array, sin: Array, options: AttentionOptions) -> tuple[Array, Any]:
        if isinstance(attend, AttendHeads):
            return attend.heads(context, heads, cos, sin, cache, options)
        queries, kv_heads = layer.attention.heads, layer.attention.kv_heads
        q, k, v = jnp.split(heads, (queries, queries + kv_heads), axis=1)
        return attend(context, rotate(q, cos, sin), rotate(k, cos, sin), v, cache, options)

    return layer(x, cos, sin, attend_heads, adapter)


def _linear_at(module: Any, path: str) -> Linear:
    for name in path.split("."):
        module = module[int(name)] if name.isdigit() else getattr(module, name)
    assert isinstance(module, Linear), f"{path} is no Linear"
    return module


class Embedding(nnx.Module):
    """A table ``[rows, E]``."""

    def __init__(self, rows: int, width: int, dtype: jnp.dtype):
        self.embedding = nnx.Param(jnp.zeros((rows, width), dtype))


class Decoder(nnx.Module):
    """Decoder-only transformer. Parameters are zeros until a loader fills them; see ``jaxsched.weights``.

    ``formats``: which kernels are quantised, by path ("layers.0.attention.qkv"). ``adapters``: which kernels have
    room for low-rank adapters, by path.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: jnp.dtype = jnp.dtype("float32"),
        formats: Formats | None = None,
        adapters: Mapping[str, AdapterShape] | None = None,
    ):
        c = self.config = config
        self.embed = Embedding(c.vocab_size, c.hidden_size, dtype)
        learned = c.learned_positions
        self.positions = Embedding(c.max_position_embeddings, c.hidden_size, dtype) if learned else None
        self.layers = nnx.List(
            [Layer(c, i, dtype, below(formats or {}, f"layers.{i}.")) for i in range(c.num_layers)]
        )
        self.norm = new_norm(c, dtype)
        self.head = None if c.tie_word_embeddings else Linear(c.hidden_size, c.vocab_size, False, dtype)
        for path, shape in (adapters or {}).items():
            _linear_at(self, path).add_adapters(shape, dtype)

    def __call__(
        self,
        tokens: Int[Array, "T"],
        positions: Int[Array, "T"],
        attend: Attend,
        context: Any,
        caches: list[Any],
        trace: list[Array] | None = None,
        adapter: Int[Array, "T"] | None = None,
    ) -> tuple[Float[Array, "T E"], list[Any]]:
        """Hidden states before the final norm, and each layer's new cache.

        ``trace``, a list, collects the embedding and each layer's output. ``adapter``: which adapter each row goes
        through, from 1; 0 is none.
        """
        x = self.embed.embedding[...][tokens]
        if self.config.embedding_scale != 1:
            x = x * jnp.asarray(self.config.embedding_scale, x.dtype)
        if self.positions is not None:
            x = x + self.positions.embedding[...][positions]
        if trace is not None:
            trace.append(x)
        turns = {rope: self.turns(rope, positions) for rope in {c.rope for c in self.config.layers}}
        out = []
        for layer, cache, config in zip(self.layers, caches, self.config.layers, strict=True):
            graph, params = nnx.split(layer)
            cos, sin = turns[config.rope]
            x, cache = _run_layer(graph, attend, nnx.as_pure(params), x, cos, sin, context, cache, adapter)
            out.append(cache)
            if trace is not None:
                trace.append(x)
        return x, out

    def turns(self, rope: int | None, positions: Int[Array, "T"]) -> tuple[Array, Array]:
        """cos and sin ``[T,1,D/2]`` of a rotary embedding; of None a turn by nothing."""
        dim = self.config.head_dim
        if rope is None:
            shape = (positions.shape[0], 1, dim // 2)
            return jnp.ones(shape, jnp.float32), jnp.zeros(shape, jnp.float32)
        inv_freq, scale = self.config.ropes[rope].frequencies(dim)
        angles = positions[:, None, None].astype(jnp.float32) * inv_freq
        return jnp.cos(angles) * scale, jnp.sin(angles) * scale

    def logits(self, hidden: Float[Array, "R E"]) -> Float[Array, "R V"]:
        """float32 scores over the vocabulary for the given rows of hidden states."""
        x = self.norm(hidden)
        exact = precision(x.dtype)
        if self.head is None:
            table = self.embed.embedding[...]
            scores = jnp.einsum("re,ve->rv", x, table, precision=exact, preferred_element_type=jnp.float32)
        else:
            scores = jnp.dot(x, self.head.kernel[...], precision=exact, preferred_element_type=jnp.float32)
        if self.config.logit_scale != 1:
            scores = scores * self.config.logit_scale
        return soft_cap(scores, self.config.logit_soft_cap)
