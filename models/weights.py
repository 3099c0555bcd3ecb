"""How the tensors of a checkpoint become the parameters of a decoder: one rule per parameter.

A family says what its tensors are called (``Names``); ``weight_table`` makes the rules.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from .config import ModelConfig
from .rope import rotary_order


@dataclasses.dataclass(frozen=True, eq=False)
class Rule:
    """One parameter, made of one or more checkpoint tensors.

    The sources are concatenated along their first axis (output features), reordered along it, and, for a kernel,
    transposed: checkpoints store ``[out, in]``, the decoder multiplies by ``[in, out]``. With ``stack`` N the sources
    are those of N such matrices one after the other, and the parameter has them as its first axis.
    ``axes`` names the parameter's axes for sharding.
    """

    sources: tuple[str, ...]  # tensor names in the checkpoint
    shapes: tuple[tuple[int, ...], ...]  # their shapes there
    axes: tuple[str, ...]  # logical axis names of the result, for sharding
    transpose: bool = False
    order: np.ndarray | None = None  # row of the joined sources that each row of the result is
    stack: int = 0  # experts

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        count = self.stack or 1
        joined = (sum(s[0] for s in self.shapes) // count, *self.shapes[0][1:])
        matrix = joined[::-1] if self.transpose else joined
        return (self.stack, *matrix) if self.stack else matrix

    def build(self, tensors: list[np.ndarray]) -> np.ndarray:
        """The parameter, from its source tensors in the order of ``sources``."""
        if not self.stack:
            return self.matrix(tensors)
        each = len(tensors) // self.stack
        result = np.empty(self.shape, tensors[0].dtype)
        for i in range(self.stack):
            result[i] = self.matrix(tensors[i * each : (i + 1) * each])
        return result

    def matrix(self, tensors: list[np.ndarray]) -> np.ndarray:
        """One matrix (of the stack), from its sources."""
        joined = tensors[0] if len(tensors) == 1 else np.concatenate(tensors, axis=0)
        if self.order is not None:
            joined = joined[self.order]
        return np.ascontiguousarray(joined.T) if self.transpose else joined


def dense(
    sources: tuple[str, ...],
    outs: tuple[int, ...],
    width_in: int,
    axes: tuple[str, str],
    order: np.ndarray | None = None,
) -> Rule:
    """Rule of a kernel ``[width_in, sum(outs)]`` whose sources are ``[out, width_in]``."""
    return Rule(sources, tuple((out, width_in) for out in outs), axes, transpose=True, order=order)


def vector(
    sources: tuple[str, ...], widths: tuple[int, ...], axis: str, order: np.ndarray | None = None
) -> Rule:
    """Rule of a bias or norm scale ``[sum(widths)]``."""
    return Rule(sources, tuple((w,) for w in widths), (axis,), order=order)


@dataclasses.dataclass(frozen=True)
class Names:
    """What a family calls its tensors, without the final ".weight" or ".bias". The defaults are those of Llama.

    Names of a layer follow ``layer``; several names are fused into one parameter, in that order.
    """

    embed: str = "model.embed_tokens"
    positions: str = ""  # learned position embeddings
    norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers.{}."
    attn_norm: str = "input_layernorm"
    attn_post_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    mlp_post_norm: str = ""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    expert: str = "mlp.experts.{}."  # followed by the names below
    expert_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"
    shared: str = "mlp.shared_expert."
    shared_gate: str = "mlp.shared_expert_gate"
    derived: tuple[str, ...] = (
        "rotary_emb.inv_freq",
    )  # endings of tensors that follow from the configuration
    outside: tuple[str, ...] = ()  # beginnings of tensors that belong to other parts of the checkpoint
    base: str = "model."  # the beginning that checkpoints of the bare model leave out
    transposed: bool = False  # kernels are stored as [in, out] (GPT-2)
    interleaved: bool = False  # the rows of fused q, k and v stand together head by head (GPT-NeoX)

    def bare(self) -> Names:
        """The names in a checkpoint that was saved without its output head (as ``base``'s module)."""
        inner = ("embed", "positions", "norm", "layer")
        return dataclasses.replace(self, **{n: getattr(self, n).removeprefix(self.base) for n in inner})


def weight_table(c: ModelConfig, names: Names) -> dict[str, Rule]:
    """Parameter path of the decoder -> where it comes from in a checkpoint with these names."""
    e = c.hidden_size
    table = {"embed.embedding": Rule((names.embed + ".weight",), ((c.vocab_size, e),), ("vocab", "embed"))}
    if c.learned_positions:
        rows = (c.max_position_embeddings, e)
        table["positions.embedding"] = Rule((names.positions + ".weight",), (rows,), ("position", "embed"))
    for i in range(c.num_layers):
        table |= _layer(c, i, names)
    table |= _norm(c, "norm", names.norm)
    if not c.tie_word_embeddings:
        table["head.kernel"] = dense((names.head + ".weight",), (c.vocab_size,), e, ("embed", "vocab"))
    return table


def _layer(c: ModelConfig, index: int, names: Names) -> dict[str, Rule]:
    ours, theirs = f"layers.{index}.", names.layer.format(index)
    q, kv, e = c.num_heads * c.head_dim, c.kv_width, c.hidden_size
    order = _head_order(c, index, names)
    table: dict[str, Rule] = {}
    places = {"pre": ("norm",), "post": ("post_norm",), "both": ("norm", "post_norm")}[c.norms]
    for place in places:
        for part in ("attn", "mlp"):
            table |= _norm(c, f"{ours}{part}_{place}", theirs + getattr(names, f"{part}_{place}"))
    qkv, out = tuple(theirs + n for n in names.qkv), (theirs + names.out,)
    outs = (q, kv, kv) if len(qkv) == 3 else (q + 2 * kv,)
    make = _Kernels(names.transposed)
    table |= make(ours + "attention.qkv", qkv, outs, e, ("embed", "heads"), c.qkv_bias, order)
    table |= make(ours + "attention.out", out, (e,), q, ("heads", "embed"), c.out_bias)
    if c.qk_norm:
        assert order is None, "norms of reordered heads would have to be reordered too"
        widths = (c.head_dim, c.head_dim) if c.qk_norm == "head" else (q, kv)
        for name, width in zip(("q_norm", "k_norm"), widths, strict=True):
            source = f"{theirs}{getattr(names, name)}.weight"
            table[f"{ours}attention.{name}.scale"] = vector((source,), (width,), "heads")
    if c.layers[index].experts:
        return table | _experts(c, ours + "mlp.", theirs, names)
    return table | _mlp(c, ours + "mlp.", theirs, names, c.intermediate_size, make)


def _norm(c: ModelConfig, ours: str, theirs: str) -> dict[str, Rule]:
    table = {f"{ours}.scale": vector((f"{theirs}.weight",), (c.hidden_size,), "embed")}
    if c.norm == "layer":
        table[f"{ours}.bias"] = vector((f"{theirs}.bias",), (c.hidden_size,), "embed")
    return table


@dataclasses.dataclass(frozen=True)
class _Kernels:
    """Makes the rules of a product: kernel, and bias if it has one."""

    transposed: bool

    def __call__(
        self,
        ours: str,
        theirs: tuple[str, ...],
        outs: tuple[int, ...],
        width_in: int,
        axes: tuple[str, str],
        bias: bool,
        order: np.ndarray | None = None,
    ) -> dict[str, Rule]:
        weights, biases = (tuple(f"{name}.{kind}" for name in theirs) for kind in ("weight", "bias"))
        if self.transposed:
            assert len(outs) == 1 and order is None
            table = {f"{ours}.kernel": Rule(weights, ((width_in, outs[0]),), axes)}
        else:
            table = {f"{ours}.kernel": dense(weights, outs, width_in, axes, order)}
        if bias:
            table[f"{ours}.bias"] = vector(biases, outs, axes[1], order)
        return table


def _mlp(c: ModelConfig, ours: str, theirs: str, names: Names, width: int, make: _Kernels) -> dict[str, Rule]:
    inner = width * (2 if c.gated else 1)
    sources = tuple(theirs + n for n in names.gate_up)
    outs = (inner // len(sources),) * len(sources)
    table = make(ours + "gate_up", sources, outs, c.hidden_size, ("embed", "mlp"), c.mlp_bias)
    return table | make(
        ours + "down", (theirs + names.down,), (c.hidden_size,), width, ("mlp", "embed"), c.mlp_bias
    )


def _experts(c: ModelConfig, ours: str, theirs: str, names: Names) -> dict[str, Rule]:
    x, e = c.experts, c.hidden_size
    assert x is not None
    make, each = _Kernels(False), [theirs + names.expert.format(j) for j in range(x.count)]
    gate_up = tuple(f"{expert}{part}.weight" for expert in each for part in names.expert_gate_up)
    down = tuple(f"{expert}{names.expert_down}.weight" for expert in each)
    table = make(ours + "router", (theirs + names.router,), (x.count,), e, ("embed", "expert"), False)
    inner, outer = ((x.width, e),) * len(gate_up), ((e, x.width),) * len(down)
    table[ours + "gate_up.kernel"] = Rule(gate_up, inner, ("expert", "embed", "mlp"), True, None, x.count)
    table[ours + "down.kernel"] = Rule(down, outer, ("expert", "mlp", "embed"), True, None, x.count)
    if x.shared_width:
        shared = dataclasses.replace(names, gate_up=names.expert_gate_up, down=names.expert_down)
        table |= _mlp(c, ours + "shared.", theirs + names.shared, shared, x.shared_width, make)
    if x.shared_gate:
        gate = (theirs + names.shared_gate,)
        table |= make(ours + "shared_gate", gate, (1,), e, ("embed", "one"), False)
    return table


def _head_order(c: ModelConfig, index: int, names: Names) -> np.ndarray | None:
    """How the rows of q, k and v are reordered: out of a head-by-head layout, and for partial rotation."""
    heads, kv_heads, dim = c.num_heads, c.num_kv_heads, c.head_dim
    rows = np.arange((heads + 2 * kv_heads) * dim).reshape(-1, dim)  # a row of this for each head
    if names.interleaved:
        rows = rows.reshape(heads, 3, dim).swapaxes(0, 1).reshape(-1, dim)
    rope = c.layers[index].rope
    turn = None if rope is None else rotary_order(c.ropes[rope], dim)
    if turn is not None:
        turned = heads + kv_heads
        rows = np.concatenate((rows[:turned][:, turn], rows[turned:]))
    return rows.reshape(-1) if names.interleaved or turn is not None else None
