"""Mistral, with or without its sliding window, and Mixtral, whose MLPs are routed."""

from __future__ import annotations

from typing import Any

from .common import read_shape, window_of
from .config import ExpertsConfig, LayerConfig, ModelConfig
from .fields import Fields
from .weights import Names

ARCHITECTURES = {"MistralForCausalLM": "mistral", "MixtralForCausalLM": "mixtral"}
NAMES = Names(
    router="block_sparse_moe.gate",
    expert="block_sparse_moe.experts.{}.",
    expert_gate_up=("w1", "w3"),
    expert_down="w2",
)


def read_config(config: dict[str, Any], architecture: str) -> ModelConfig:
    """``config.json`` of a Mistral or Mixtral checkpoint as a ModelConfig. Raises as ``llama.read_config``."""
    mixtral = architecture == "MixtralForCausalLM"
    f = Fields("Mixtral" if mixtral else "Mistral", config)
    shape = read_shape(f, default_eps=1e-5 if mixtral else 1e-6, max_position=131072)
    shape["num_kv_heads"] = f.get("num_key_value_heads", default=8)
    experts = None
    if mixtral:
        count, each = (
            f.get("num_local_experts", "num_experts", default=8),
            f.get("num_experts_per_tok", default=2),
        )
        experts = ExpertsConfig(count, each, shape["intermediate_size"], normalize=True)
    missing = 4096 if not mixtral and "sliding_window" not in config else None
    layer = LayerConfig(window_of(f, default=missing), experts=mixtral)
    rope = f.rope(shape["max_position_embeddings"], theta=1e6 if mixtral else 1e4)
    f.done()
    layers = (layer,) * shape["num_layers"]
    return ModelConfig(architecture, ropes=(rope,), layers=layers, experts=experts, **shape)
