"""What a decoder needs to know, read once from a checkpoint's configuration."""

from __future__ import annotations

import dataclasses
import math

from .rope import RopeConfig

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
MAX_LAYERS, MAX_EXPERTS = 4096, 4096  # a configuration that says more is damaged


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """In what one layer may differ from the others."""

    window: int | None = (
        None  # a query at position p sees positions p - window + 1 .. p; None = all before it
    )
    rope: int | None = 0  # which of ModelConfig.ropes turns its heads; None = no rotation
    experts: bool = False  # a routed MLP
    scale: float | None = None  # multiplies q·k; None = ModelConfig's


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """A routed MLP (Shazeer et al. 2017): each token goes to the experts with the highest router scores."""

    count: int  # experts per layer
    per_token: int  # experts that each token goes to
    width: int  # of one expert's MLP
    normalize: bool  # the weights of a token's experts are scaled to a sum of 1
    shared_width: int = 0  # of an expert that every token goes to; 0 = there is none
    shared_gate: bool = False  # the shared expert is weighted by a sigmoid of its own

    def __post_init__(self) -> None:
        for name in ("count", "per_token", "width"):
            _positive("expert " + name, getattr(self, name))
        if self.count > MAX_EXPERTS:
            raise ValueError(
                f"model configuration: {self.count} experts; more than {MAX_EXPERTS} are not supported"
            )
        if self.per_token > self.count:
            raise ValueError(
                f"model configuration: num_experts_per_tok is {self.per_token}, but there are {self.count} experts"
            )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and formula of one decoder. Hashable: it is part of every compiled program's key.

    A family's ``read_config`` makes it. The defaults are those of Llama.
    """

    architecture: str  # Hugging Face class name, e.g. "LlamaForCausalLM"
    vocab_size: int  # V, rows of the embedding table
    hidden_size: int  # E
    num_layers: int  # L
    num_heads: int  # H, query heads
    num_kv_heads: int  # K
    head_dim: int  # D
    intermediate_size: int  # width of the MLP
    max_position_embeddings: int  # tokens
    norm_eps: float = 1e-6
    ropes: tuple[RopeConfig, ...] = (RopeConfig(),)
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False  # of attention's output projection
    mlp_bias: bool = False
    dtype: str = "float32"  # dtype the checkpoint was saved in
    layers: tuple[LayerConfig, ...] = ()  # one for each layer; () = all are LayerConfig()
    norm: str = "rms"  # "rms", or "layer" with mean and bias
    norm_offset: float = 0.0  # added to the weights of norms (Gemma: 1)
    norms: str = "pre"  # where a layer's norms are: "pre" its two parts, "post" them, or "both"
    qk_norm: str = ""  # RMS norm of queries and keys: "" none, "head" each head, "all" heads together
    parallel: bool = False  # attention and MLP read the same input, and their sum is added
    learned_positions: bool = False  # a table of position embeddings is added to the input
    activation: str = "silu"  # of the MLP, one of ACTIVATIONS
    gated: bool = True  # the MLP multiplies its activation by a second projection (Shazeer 2020)
    experts: ExpertsConfig | None = None
    attention_scale: float | None = None  # multiplies q·k; None = head_dim ** -0.5
    attention_soft_cap: float | None = None  # scores become cap * tanh(scores / cap)
    logit_soft_cap: float | None = None
    clip_qkv: float | None = None  # queries, keys and values are clipped to ± this
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and MLP add
    logit_scale: float = 1.0

    def __post_init__(self) -> None:
        for field in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
                      "intermediate_size", "max_position_embeddings"):  # fmt: skip
            _positive(field, getattr(self, field))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model configuration: num_attention_heads {self.num_heads} is not a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if not 0 < self.norm_eps < 1:
            raise ValueError(f"model configuration: norm_eps is {self.norm_eps}; it must be in (0, 1)")
        if self.head_dim % 2:
            raise ValueError(
                f"model configuration: head_dim {self.head_dim} is odd; rotary embedding needs it even"
            )
        if self.num_layers > MAX_LAYERS:
            raise ValueError(
                f"model configuration: num_layers is {self.num_layers}; more than {MAX_LAYERS} are not supported"
            )
        if not self.layers:
            object.__setattr__(self, "layers", (LayerConfig(),) * self.num_layers)
        self._check_formula()

    def _check_formula(self) -> None:
        if len(self.layers) != self.num_layers:
            raise ValueError(
                f"model configuration: {len(self.layers)} layers are described, num_hidden_layers is {self.num_layers}"
            )
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"hidden_act {self.activation!r} is not supported; supported: {', '.join(ACTIVATIONS)}"
            )
        scales = ("attention_scale", "attention_soft_cap", "logit_soft_cap", "clip_qkv", "embedding_scale",
                  "residual_scale", "logit_scale")  # fmt: skip
        for name in scales:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"model configuration: {name} is {value}; it must be a positive number")
        for layer in self.layers:
            if layer.window is not None:
                _positive("sliding_window", layer.window)
            if layer.rope is not None:
                self.ropes[layer.rope].frequencies(self.head_dim)

    @property
    def rope(self) -> RopeConfig | None:
        """The rotary embedding of the layers that see everything, which is what decides how far the model sees."""
        for layer in sorted(self.layers, key=lambda layer: layer.window is not None):
            if layer.rope is not None:
                return self.ropes[layer.rope]
        return None

    @property
    def cache_window(self) -> int | None:
        """The last positions that some layer still looks at, where all layers have a window; else None."""
        windows = [layer.window for layer in self.layers]
        return None if None in windows else max(w for w in windows if w is not None)

    def at_length(self, tokens: int | None) -> ModelConfig:
        """The formula for sequences of up to ``tokens`` (None: the model's limit); see ``RopeConfig.at_length``."""
        if tokens is None:
            return self
        return dataclasses.replace(self, ropes=tuple(rope.at_length(tokens) for rope in self.ropes))

    @property
    def num_parameters(self) -> int:
        """Number of weights, a tied head counted once."""
        e, q, kv = self.hidden_size, self.num_heads * self.head_dim, self.kv_width
        norm = 2 * e if self.norm == "layer" else e
        layer = e * (q + 2 * kv) + q * e + norm * (4 if self.norms == "both" else 2)
        layer += (q + 2 * kv) * self.qkv_bias + e * self.out_bias
        layer += {"": 0, "head": 2 * self.head_dim, "all": q + kv}[self.qk_norm]
        routed = sum(layer.experts for layer in self.layers)
        table = self.vocab_size * e * (1 if self.tie_word_embeddings else 2)
        table += self.max_position_embeddings * e * self.learned_positions
        mlps = (self.num_layers - routed) * self._mlp_parameters(self.intermediate_size)
        if (x := self.experts) is not None:
            one = e * x.count + x.count * self._mlp_parameters(x.width)
            if x.shared_width:
                one += self._mlp_parameters(x.shared_width) + e * x.shared_gate
            mlps += routed * one
        return table + self.num_layers * layer + mlps + norm

    def _mlp_parameters(self, width: int) -> int:
        inner = width * (2 if self.gated else 1)
        return self.hidden_size * (inner + width) + (inner + self.hidden_size) * self.mlp_bias

    @property
    def kv_width(self) -> int:
        """Elements of K (and of V) per token and layer."""
        return self.num_kv_heads * self.head_dim

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of KV cache that one token takes over all layers, for elements of ``itemsize`` bytes."""
        return 2 * self.num_layers * self.kv_width * itemsize


def _positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"model configuration: {name} is {value!r}; it must be a positive integer")
