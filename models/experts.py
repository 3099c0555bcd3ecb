"""The routed MLP (mixture of experts)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxsched.pallas_kernels.grouped import grouped_matmul
from jaxsched.pallas_kernels.products import Stored

from .config import ModelConfig
from .parts import Formats, Kernel, Linear, Mlp, activate, below, precision


class Experts(nnx.Module):
    """Each row goes to its ``per_token`` best experts (Shazeer et al. 2017; Fedus et al. 2021), and to a shared one.

    Rows are sorted by expert, so that one grouped product does the work of all experts on just their rows; a row's
    result does not depend on the other rows.
    """

    def __init__(self, c: ModelConfig, dtype: jnp.dtype, formats: Formats):
        x = c.experts
        assert x is not None
        self.per_token, self.normalize = x.per_token, x.normalize
        self.activation, self.gated = c.activation, c.gated
        inner = x.width * (2 if c.gated else 1)
        self.router = Linear(c.hidden_size, x.count, False, dtype)
        self.gate_up = Kernel((x.count, c.hidden_size, inner), dtype, formats.get("gate_up"))
        self.down = Kernel((x.count, x.width, c.hidden_size), dtype, formats.get("down"))
        self.shared = Mlp(c, x.shared_width, dtype, below(formats, "shared.")) if x.shared_width else None
        self.shared_gate = Linear(c.hidden_size, 1, False, dtype) if x.shared_gate else None

    def __call__(self, x: Float[Array, "T E"], adapter: Int[Array, "T"] | None = None) -> Float[Array, "T E"]:
        """``adapter``, as in ``Linear``, concerns the shared expert only."""
        weights, chosen = self.route(x)
        y = self._chosen(x, weights, chosen)
        if self.shared is None:
            return y
        shared = self.shared(x, adapter)
        if self.shared_gate is not None:
            shared = jax.nn.sigmoid(self.shared_gate(x)) * shared
        return y + shared

    def route(self, x: Float[Array, "T E"]) -> tuple[Float[Array, "T X"], Int[Array, "T X"]]:
        """Each row's experts and their weights, best first."""
        scores = jax.nn.softmax(self.router(x).astype(jnp.float32), axis=-1)
        weights, chosen = jax.lax.top_k(scores, self.per_token)
        if self.normalize:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return weights.astype(x.dtype), chosen

    def _chosen(self, x: Array, weights: Array, chosen: Array) -> Array:
        """The weighted sum of the MLPs of each row's experts."""
        rows, each = chosen.shape
        flat = chosen.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        group = flat[order]
        inner = self._product(x[order // each], self.gate_up, group)
        out = self._product(activate(inner, self.activation, self.gated), self.down, group)
        back = jnp.argsort(order)  # where each (row, expert) has gone
        out = out[back].reshape(rows, each, -1)
        return jnp.einsum("txe,tx->te", out, weights, precision=precision(x.dtype))

    def _product(self, x: Array, kernel: Kernel, group: Array) -> Array:
        stored, scale, offset = kernel.arrays()
        return grouped_matmul(x, stored if scale is None else Stored(stored, scale, offset), group)
