"""Gemma 2 and the text part of Gemma 3."""

from __future__ import annotations

import dataclasses
from typing import Any

from .common import read_shape, window_of
from .config import LayerConfig, ModelConfig
from .fields import Fields
from .rope import RopeConfig, read_rope
from .weights import Names

ARCHITECTURES = {
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3",
}
NAMES = Names(
    attn_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
# The checkpoints with a vision tower have their text model inside; what is outside it is not read.
MULTIMODAL_NAMES = dataclasses.replace(
    NAMES,
    embed="language_model.model.embed_tokens",
    norm="language_model.model.norm",
    head="language_model.lm_head",
    layer="language_model.model.layers.{}.",
    outside=("vision_tower.", "multi_modal_projector."),
    base="",
)


def names(architecture: str) -> Names:
    """What the architecture calls its tensors."""
    return MULTIMODAL_NAMES if architecture == "Gemma3ForConditionalGeneration" else NAMES


def read_config(config: dict[str, Any], architecture: str) -> ModelConfig:
    """``config.json`` of a Gemma checkpoint as a ModelConfig. Raises as ``llama.read_config``."""
    third = architecture != "Gemma2ForCausalLM"
    if architecture == "Gemma3ForConditionalGeneration":
        config = _text_config(config)
    f = Fields("Gemma 3" if third else "Gemma 2", config)
    shape = read_shape(
        f, activation=("hidden_activation", "hidden_act"), default_activation="gelu_pytorch_tanh",
        max_position=131072 if third else 8192, tied=True,
    )  # fmt: skip
    shape["num_kv_heads"] = f.get("num_key_value_heads", default=4)
    shape["head_dim"] = f.get("head_dim", default=256)
    f.only("use_bidirectional_attention", False)
    bias = f.flag("attention_bias")
    scalar = f.number("query_pre_attn_scalar", default=256)
    count = shape["num_layers"]
    period = f.get("sliding_window_pattern", "_sliding_window_pattern", default=6) if third else 2
    if not isinstance(period, int) or period < 1:
        raise ValueError(f"config.json: sliding_window_pattern is {period!r}; it must be a positive integer")
    windows = f.windows(count, window_of(f, default=4096), [(i + 1) % period != 0 for i in range(count)])
    f.neutral("cache_implementation")
    ropes = (
        _ropes(f, shape["max_position_embeddings"]) if third else (f.rope(shape["max_position_embeddings"]),)
    )
    local = 1 if third else 0

    def cap(name: str, default: float) -> float | None:  # null means none, where Gemma 2 has one by default
        return None if third or name in config else default

    shape |= {
        "qkv_bias": bias,
        "out_bias": bias,
        "norm_offset": 1.0,
        "norms": "both",
        "qk_norm": "head" if third else "",
        "attention_scale": None if scalar is None or scalar <= 0 else scalar**-0.5,
        "attention_soft_cap": f.number("attn_logit_softcapping", default=cap("attn_logit_softcapping", 50.0)),
        "logit_soft_cap": f.number("final_logit_softcapping", default=cap("final_logit_softcapping", 30.0)),
        "embedding_scale": float(shape["hidden_size"]) ** 0.5,
        "layers": tuple(LayerConfig(w, 0 if w is None else local) for w in windows),
    }  # fmt: skip
    f.done()
    if scalar is None or scalar <= 0:
        raise ValueError(f"config.json: query_pre_attn_scalar is {scalar}; it must be positive")
    return ModelConfig(architecture, ropes=ropes, **shape)


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise ValueError(
            "config.json lacks 'text_config', which a Gemma 3 checkpoint with a vision tower needs"
        )
    outer = {key: config[key] for key in ("dtype", "torch_dtype", "quantization_config") if key in config}
    # The published files leave out what has its default.
    defaults = {"vocab_size": 262208, "num_attention_heads": 8, "hidden_size": 2304, "num_hidden_layers": 26,
                "intermediate_size": 9216}  # fmt: skip
    return {**defaults, **outer, **text}


def _ropes(f: Fields, max_position: int) -> tuple[RopeConfig, RopeConfig]:
    """The rotary embeddings of layers that see everything, and of those with a window."""
    both = f.get("rope_parameters", default={})
    if "full_attention" in both or "sliding_attention" in both:
        f.neutral("rope_theta", "rope_local_base_freq", "rope_scaling")
        whole, local = both.get("full_attention") or {}, both.get("sliding_attention") or {}
        return (
            read_rope({"rope_parameters": whole}, max_position, theta=1e6),
            read_rope({"rope_parameters": local}, max_position, theta=1e4),
        )
    theta = f.number("rope_local_base_freq", default=1e4)
    assert theta is not None
    return f.rope(max_position, theta=1e6), RopeConfig(theta)
