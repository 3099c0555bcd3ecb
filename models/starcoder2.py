"""StarCoder2: layer norms, a plain MLP, biases, a sliding window."""

from __future__ import annotations

from typing import Any

from .common import read_shape, window_of
from .config import LayerConfig, ModelConfig
from .fields import Fields
from .weights import Names

ARCHITECTURES = {"Starcoder2ForCausalLM": "starcoder2"}
NAMES = Names(gate_up=("mlp.c_fc",), down="mlp.c_proj")


def read_config(config: dict[str, Any], architecture: str) -> ModelConfig:
    """``config.json`` of a StarCoder2 checkpoint as a ModelConfig. Raises as ``llama.read_config``."""
    f = Fields("StarCoder2", config)
    shape = read_shape(
        f,
        eps=("norm_epsilon",),
        default_eps=1e-5,
        default_activation="gelu_pytorch_tanh",
        max_position=4096,
        tied=True,
    )
    f.only("mlp_type", "default")
    f.only("norm_type", "layer_norm")
    f.only("attention_bias", True)
    bias = f.flag("use_bias", default=True)
    shape |= {"norm": "layer", "gated": False, "qkv_bias": bias, "out_bias": bias, "mlp_bias": bias}
    shape["num_kv_heads"] = f.get("num_key_value_heads", default=2)
    layers = (LayerConfig(window_of(f)),) * shape["num_layers"]
    rope = f.rope(shape["max_position_embeddings"])
    f.done()
    return ModelConfig(architecture, ropes=(rope,), layers=layers, **shape)
