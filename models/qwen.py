"""Qwen 2, 2.5 and 3, dense and with routed MLPs."""

from __future__ import annotations

from typing import Any

from .common import read_shape, window_of
from .config import ExpertsConfig, LayerConfig, ModelConfig
from .fields import Fields
from .weights import Names

ARCHITECTURES = {
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
NAMES = Names()


def read_config(config: dict[str, Any], architecture: str) -> ModelConfig:
    """``config.json`` of a Qwen checkpoint as a ModelConfig. Raises as ``llama.read_config``."""
    third, routed = architecture.startswith("Qwen3"), "Moe" in architecture
    f = Fields(architecture.removesuffix("ForCausalLM"), config)
    shape = read_shape(f, max_position=32768)
    count = shape["num_layers"]
    if third:
        bias = f.flag("attention_bias")
        shape |= {"qkv_bias": bias, "out_bias": bias, "qk_norm": "head"}
        shape["head_dim"] = f.get("head_dim", default=shape["head_dim"] if routed else 128)
    else:
        shape["qkv_bias"] = f.flag("qkv_bias", default=True) if routed else True
    experts, places = _experts(f, count, shared=not third) if routed else (None, [False] * count)
    windows = _windows(f, architecture, count)
    shape["layers"] = tuple(LayerConfig(w, experts=x) for w, x in zip(windows, places, strict=True))
    rope = f.rope(shape["max_position_embeddings"])
    f.done()
    return ModelConfig(architecture, ropes=(rope,), experts=experts, **shape)


def _experts(f: Fields, count: int, shared: bool) -> tuple[ExpertsConfig, list[bool]]:
    """The routed MLPs, and which layers have them."""
    step, dense = f.get("decoder_sparse_step", default=1), f.get("mlp_only_layers", default=[])
    experts = ExpertsConfig(
        f.need("num_experts", "num_local_experts"),
        f.need("num_experts_per_tok"),
        f.need("moe_intermediate_size"),
        normalize=f.flag("norm_topk_prob"),
        shared_width=f.need("shared_expert_intermediate_size") if shared else 0,
        shared_gate=shared,
    )
    return experts, [i not in dense and step > 0 and (i + 1) % step == 0 for i in range(count)]


def _windows(f: Fields, architecture: str, count: int) -> list[int | None]:
    window = window_of(f, switch="use_sliding_window", default=4096)
    if architecture == "Qwen3MoeForCausalLM":  # transformers gives every layer the window here
        f.neutral("max_window_layers")
        return [window] * count
    first = f.get("max_window_layers", default=28)
    if architecture == "Qwen2MoeForCausalLM":
        return f.windows(count, window, [i % 2 == 0 and i < first for i in range(count)])
    return f.windows(count, window, [i >= first for i in range(count)])
