"""The Llama family: Llama 2 and 3, SmolLM2 and whatever else declares ``LlamaForCausalLM``."""

from __future__ import annotations

from typing import Any

from .config import ModelConfig, read_rope
from .weights import Rule, dense, vector

ARCHITECTURES = ("LlamaForCausalLM",)
MODEL_TYPES = ("llama",)

# Tensors that some checkpoints carry although they follow from the configuration.
DERIVED = ("rotary_emb.inv_freq",)


def read_config(config: dict[str, Any]) -> ModelConfig:
    """``config.json`` of a Llama checkpoint as a ModelConfig.

    Raises ValueError naming the field, for one that is missing or whose value this decoder does not compute.
    """
    for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
        if config.get(key) is None:
            raise ValueError(f"config.json lacks {key!r}, which a Llama checkpoint needs")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"hidden_act {config['hidden_act']!r} is not supported for Llama; supported: silu")
    if (config.get("pretraining_tp") or 1) != 1:
        raise ValueError(f"pretraining_tp {config['pretraining_tp']} is not supported; supported: 1")
    if config.get("sliding_window"):
        raise ValueError(f"sliding_window {config['sliding_window']} is not supported for Llama")
    if config.get("quantization_config"):
        raise ValueError(
            "quantized checkpoints (quantization_config) are not supported; use an unquantized one or GGUF"
        )
    heads, max_position = config["num_attention_heads"], config.get("max_position_embeddings") or 2048
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        intermediate_size=config["intermediate_size"],
        max_position_embeddings=max_position,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=read_rope(config, max_position),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    )


def weight_table(c: ModelConfig) -> dict[str, Rule]:
    """Parameter path of the decoder -> where it comes from in a Hugging Face checkpoint."""
    q, kv, e, f = c.num_heads * c.head_dim, c.kv_width, c.hidden_size, c.intermediate_size
    table = {
        "embed.embedding": Rule(("model.embed_tokens.weight",), ((c.vocab_size, e),), ("vocab", "embed"))
    }
    for i in range(c.num_layers):
        hf, ours = f"model.layers.{i}.", f"layers.{i}."
        qkv = tuple(f"{hf}self_attn.{n}_proj" for n in "qkv")
        gate_up = (f"{hf}mlp.gate_proj", f"{hf}mlp.up_proj")
        out, down = (f"{hf}self_attn.o_proj",), (f"{hf}mlp.down_proj",)

        def named(parts: tuple[str, ...], kind: str) -> tuple[str, ...]:
            return tuple(f"{part}.{kind}" for part in parts)

        table[ours + "attn_norm.scale"] = vector((f"{hf}input_layernorm.weight",), (e,), "embed")
        table[ours + "attention.qkv.kernel"] = dense(named(qkv, "weight"), (q, kv, kv), e, ("embed", "heads"))
        table[ours + "attention.out.kernel"] = dense(named(out, "weight"), (e,), q, ("heads", "embed"))
        table[ours + "mlp_norm.scale"] = vector((f"{hf}post_attention_layernorm.weight",), (e,), "embed")
        table[ours + "mlp.gate_up.kernel"] = dense(named(gate_up, "weight"), (f, f), e, ("embed", "mlp"))
        table[ours + "mlp.down.kernel"] = dense(named(down, "weight"), (e,), f, ("mlp", "embed"))
        if c.attention_bias:
            table[ours + "attention.qkv.bias"] = vector(named(qkv, "bias"), (q, kv, kv), "heads")
            table[ours + "attention.out.bias"] = vector(named(out, "bias"), (e,), "embed")
        if c.mlp_bias:
            table[ours + "mlp.gate_up.bias"] = vector(named(gate_up, "bias"), (f, f), "mlp")
            table[ours + "mlp.down.bias"] = vector(named(down, "bias"), (e,), "embed")
    table["norm.scale"] = vector(("model.norm.weight",), (e,), "embed")
    if not c.tie_word_embeddings:
        table["head.kernel"] = dense(("lm_head.weight",), (c.vocab_size,), e, ("embed", "vocab"))
    return table
