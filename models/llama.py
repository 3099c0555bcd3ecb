"""Llama 2 and 3, SmolLM2, and whatever else declares ``LlamaForCausalLM``. SmolLM3 leaves some layers unrotated."""

from __future__ import annotations

from typing import Any

from .common import read_shape, window_of
from .config import LayerConfig, ModelConfig
from .fields import Fields
from .weights import Names

ARCHITECTURES = {"LlamaForCausalLM": "llama", "SmolLM3ForCausalLM": "smollm3"}
NAMES = Names()


def read_config(config: dict[str, Any], architecture: str) -> ModelConfig:
    """``config.json`` of a Llama or SmolLM3 checkpoint as a ModelConfig.

    Raises ValueError naming the field, for one that is missing or whose value this decoder does not compute.
    """
    smollm3 = architecture == "SmolLM3ForCausalLM"
    f = Fields("SmolLM3" if smollm3 else "Llama", config)
    f.only("pretraining_tp", 1)
    shape = read_shape(f, tied=smollm3, max_position=32768 if smollm3 else 2048)
    if smollm3:
        layers = _smollm3_layers(f, shape["num_layers"])
    else:
        f.only("sliding_window")
        layers = ()
    bias = f.flag("attention_bias")
    shape |= {"qkv_bias": bias, "out_bias": bias, "mlp_bias": f.flag("mlp_bias"), "layers": layers}
    rope = f.rope(shape["max_position_embeddings"], theta=2e6 if smollm3 else 1e4)
    f.done()
    return ModelConfig(architecture, ropes=(rope,), **shape)


def _smollm3_layers(f: Fields, count: int) -> tuple[LayerConfig, ...]:
    interval = f.get("no_rope_layer_interval", default=4)
    turned = f.get("no_rope_layers", default=[int((i + 1) % interval != 0) for i in range(count)])
    if not isinstance(turned, list) or len(turned) != count or any(x not in (0, 1) for x in turned):
        raise ValueError(f"no_rope_layers must have 0 or 1 for each of {count} layers, not {turned!r:.80}")
    windows = f.windows(count, window_of(f, switch="use_sliding_window"), [not x for x in turned])
    return tuple(LayerConfig(w, 0 if x else None) for w, x in zip(windows, turned, strict=True))
