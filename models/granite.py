"""Granite 3: Llama with four multipliers."""

from __future__ import annotations

from typing import Any

from .common import read_shape
from .config import ModelConfig
from .fields import Fields
from .weights import Names

ARCHITECTURES = {"GraniteForCausalLM": "granite"}
NAMES = Names()


def read_config(config: dict[str, Any], architecture: str) -> ModelConfig:
    """``config.json`` of a Granite checkpoint as a ModelConfig. Raises as ``llama.read_config``."""
    f = Fields("Granite", config)
    shape = read_shape(f)
    bias = f.flag("attention_bias")
    division = f.number("logits_scaling", default=1.0)
    if not division or division < 0:
        raise ValueError(f"config.json: logits_scaling is {division}; it must be positive")
    shape |= {
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": f.flag("mlp_bias"),
        "embedding_scale": f.number("embedding_multiplier", default=1.0),
        "attention_scale": f.number("attention_multiplier", default=1.0),
        "residual_scale": f.number("residual_multiplier", default=1.0),
        "logit_scale": 1 / division,
    }
    rope = f.rope(shape["max_position_embeddings"])
    f.done()
    return ModelConfig(architecture, ropes=(rope,), **shape)
