"""Phi-3, 3.5 and 4: fused projections, partial rotation, longrope."""

from __future__ import annotations

from typing import Any

from .common import read_shape, window_of
from .config import LayerConfig, ModelConfig
from .fields import Fields
from .weights import Names

ARCHITECTURES = {"Phi3ForCausalLM": "phi3"}
NAMES = Names(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))


def read_config(config: dict[str, Any], architecture: str) -> ModelConfig:
    """``config.json`` of a Phi-3 checkpoint as a ModelConfig. Raises as ``llama.read_config``."""
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("type", scaling.get("rope_type")) in ("su", "yarn"):
        # Two older names of the same thing.
        rest = {key: value for key, value in scaling.items() if key not in ("type", "rope_type")}
        config = {**config, "rope_scaling": {**rest, "rope_type": "longrope"}}
    f = Fields("Phi-3", config)
    shape = read_shape(f, default_eps=1e-5, max_position=4096)
    for name in ("attention_bias", "mlp_bias"):
        f.only(name, False)
    layers = (LayerConfig(window_of(f)),) * shape["num_layers"]
    rope = f.rope(shape["max_position_embeddings"])
    f.done()
    return ModelConfig(architecture, ropes=(rope,), layers=layers, **shape)
