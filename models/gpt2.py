"""GPT-2: learned positions, layer norms, kernels stored the other way round."""

from __future__ import annotations

from typing import Any

from .config import LayerConfig, ModelConfig
from .fields import Fields
from .weights import Names

ARCHITECTURES = {"GPT2LMHeadModel": "gpt2"}
NAMES = Names(
    embed="transformer.wte",
    positions="transformer.wpe",
    norm="transformer.ln_f",
    layer="transformer.h.{}.",
    attn_norm="ln_1",
    mlp_norm="ln_2",
    qkv=("attn.c_attn",),
    out="attn.c_proj",
    gate_up=("mlp.c_fc",),
    down="mlp.c_proj",
    derived=(".attn.bias", ".attn.masked_bias"),  # the causal mask
    base="transformer.",
    transposed=True,
)


def read_config(config: dict[str, Any], architecture: str) -> ModelConfig:
    """``config.json`` of a GPT-2 checkpoint as a ModelConfig. Raises as ``llama.read_config``."""
    f = Fields("GPT-2", config)
    hidden, count = f.need("n_embd", "hidden_size"), f.layers("n_layer", "num_hidden_layers")
    heads = f.count("n_head", "num_attention_heads", most=hidden)
    positions = f.get("n_positions", "max_position_embeddings", default=1024)
    f.only("n_ctx", positions)
    f.only("add_cross_attention", False)
    dim = hidden // heads
    scale = dim**-0.5 if f.flag("scale_attn_weights", default=True) else 1.0
    by_layer = f.flag("scale_attn_by_inverse_layer_idx")
    layers = [LayerConfig(rope=None, scale=scale / (i + 1) if by_layer else scale) for i in range(count)]
    result = ModelConfig(
        architecture,
        vocab_size=f.need("vocab_size"),
        hidden_size=hidden,
        num_layers=count,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=dim,
        intermediate_size=f.get("n_inner", default=4 * hidden),
        max_position_embeddings=positions,
        norm="layer",
        norm_eps=f.number("layer_norm_epsilon", default=1e-5) or 0,
        activation=f.activation("activation_function", default="gelu_new"),
        tie_word_embeddings=f.flag("tie_word_embeddings", default=True),
        learned_positions=True,
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        ropes=(),
        layers=tuple(layers),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    )
    f.done()
    return result
