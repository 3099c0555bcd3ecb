"""OLMo 2, with its norms behind attention and MLP, and OLMoE."""

from __future__ import annotations

from typing import Any

from .common import read_shape
from .config import ExpertsConfig, LayerConfig, ModelConfig
from .fields import Fields
from .weights import Names

ARCHITECTURES = {"Olmo2ForCausalLM": "olmo2", "OlmoeForCausalLM": "olmoe"}
OLMO2_NAMES = Names(attn_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm")


def names(architecture: str) -> Names:
    """What the architecture calls its tensors."""
    return OLMO2_NAMES if architecture == "Olmo2ForCausalLM" else Names()


def read_config(config: dict[str, Any], architecture: str) -> ModelConfig:
    """``config.json`` of an OLMo checkpoint as a ModelConfig. Raises as ``llama.read_config``."""
    routed = architecture == "OlmoeForCausalLM"
    f = Fields("OLMoE" if routed else "OLMo 2", config)
    shape = read_shape(f, default_eps=1e-5, max_position=4096 if routed else 2048)
    bias = f.flag("attention_bias")
    shape |= {"qkv_bias": bias, "out_bias": bias, "qk_norm": "all"}
    if routed:
        shape |= {
            "clip_qkv": f.number("clip_qkv"),
            "experts": ExpertsConfig(
                f.get("num_experts", "num_local_experts", default=64),
                f.get("num_experts_per_tok", default=8),
                shape["intermediate_size"],
                normalize=f.flag("norm_topk_prob"),
            ),
            "layers": (LayerConfig(experts=True),) * shape["num_layers"],
        }
    else:
        shape["norms"] = "post"
    rope = f.rope(shape["max_position_embeddings"])
    f.done()
    return ModelConfig(architecture, ropes=(rope,), **shape)
