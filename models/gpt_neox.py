"""GPT-NeoX and Pythia: partial rotation, and attention and MLP beside each other."""

from __future__ import annotations

from typing import Any

from .common import read_shape
from .config import ModelConfig
from .fields import Fields
from .weights import Names

ARCHITECTURES = {"GPTNeoXForCausalLM": "gpt_neox"}
NAMES = Names(
    embed="gpt_neox.embed_in",
    norm="gpt_neox.final_layer_norm",
    head="embed_out",
    layer="gpt_neox.layers.{}.",
    qkv=("attention.query_key_value",),
    out="attention.dense",
    gate_up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    derived=(".attention.bias", ".attention.masked_bias", ".attention.rotary_emb.inv_freq"),
    base="gpt_neox.",
    interleaved=True,
)


def read_config(config: dict[str, Any], architecture: str) -> ModelConfig:
    """``config.json`` of a GPT-NeoX checkpoint as a ModelConfig. Raises as ``llama.read_config``."""
    f = Fields("GPT-NeoX", config)
    shape = read_shape(f, eps=("layer_norm_eps",), default_eps=1e-5, default_activation="gelu")
    f.only("num_key_value_heads", shape["num_heads"])
    bias = f.flag("attention_bias", default=True)
    shape |= {
        "norm": "layer",
        "gated": False,
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": True,
        "parallel": f.flag("use_parallel_residual", default=True),
    }
    theta, share = f.number("rotary_emb_base", default=1e4), f.number("rotary_pct", default=0.25)
    assert theta is not None and share is not None
    rope = f.rope(shape["max_position_embeddings"], theta=theta, partial=share)
    f.done()
    return ModelConfig(architecture, ropes=(rope,), **shape)
