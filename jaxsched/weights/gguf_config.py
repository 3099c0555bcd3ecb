"""The metadata of a GGUF file, said in the words of a Hugging Face config.json."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxsched.gguf_file import GGUFHeader

from ..models import RopeConfig
from .errors import CheckpointError

# general.architecture -> class name in config.json; any other goes to the registry as model_type.
_ARCHITECTURES = {"llama": "LlamaForCausalLM"}
_NUMBERS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "sliding_window": "attention.sliding_window",
}
_TOKENS = {
    "bos_token_id": ("bos_token_id",),
    "eos_token_id": ("eos_token_id", "eot_token_id", "eom_token_id"),
}
_FLOATS = {0: "float32", 1: "float16", 30: "bfloat16"}  # ggml's numbers of the types that are not quantized


def gguf_architecture(header: GGUFHeader) -> dict[str, Any]:
    """The part of the config by which the registry picks a family.

    Raises CheckpointError for a file that does not say what it is, and for one of several parts.
    """
    arch = header.metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise CheckpointError(
            f"{header.path} lacks general.architecture, so it holds no model; pass a model file"
        )
    if header.metadata.get("split.count", 0) > 1:
        raise CheckpointError(
            f"{header.path} is one of {header.metadata['split.count']} parts; only single GGUF files "
            "are read: join the parts with llama.cpp's llama-gguf-split --merge"
        )
    return {"architectures": [_ARCHITECTURES[arch]] if arch in _ARCHITECTURES else [], "model_type": arch}


def gguf_config(header: GGUFHeader, rope_factors: np.ndarray | None) -> dict[str, Any]:
    """A config.json for the model in the file.

    ``rope_factors`` is the tensor ``rope_freqs.weight`` ``[D/2]`` where the file has it.
    Raises CheckpointError naming the key that is missing or whose value is not supported.
    """
    config, prefix = gguf_architecture(header), header.metadata["general.architecture"] + "."
    if "token_embd.weight" not in header.tensors:
        raise CheckpointError(
            f"{header.path} lacks the tensor 'token_embd.weight'; it is not a complete model"
        )
    for name, key in _NUMBERS.items():
        if (value := header.metadata.get(prefix + key)) is not None:
            config[name] = _number(header, prefix + key, value)
    for name in ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"):
        if name not in config:
            raise CheckpointError(
                f"{header.path} lacks the metadata {prefix + _NUMBERS[name]!r}; the file is incomplete"
            )
    if config["num_attention_heads"] < 1:
        raise CheckpointError(
            f"{header.path}: {prefix}attention.head_count is {config['num_attention_heads']}"
        )
    if header.metadata.get(prefix + "expert_count"):
        raise CheckpointError(
            f"{header.path} is a mixture of experts ({prefix}expert_count); only dense models are read"
        )
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    for key in ("attention.value_length", "rope.dimension_count"):
        if header.metadata.get(prefix + key, config["head_dim"]) != config["head_dim"]:
            raise CheckpointError(
                f"{header.path}: {prefix + key} is {header.metadata[prefix + key]}; "
                f"supported: the head width, {config['head_dim']}"
            )
    config["vocab_size"] = header.tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in header.tensors
    config["rope_theta"] = float(header.metadata.get(prefix + "rope.freq_base", 10_000.0))
    config["rope_scaling"] = _rope_scaling(header, prefix, config, rope_factors)
    config["dtype"] = _dtype(header)
    for name, keys in _TOKENS.items():
        found = [
            header.metadata[f"tokenizer.ggml.{k}"] for k in keys if f"tokenizer.ggml.{k}" in header.metadata
        ]
        if found:
            config[name] = found[0] if name == "bos_token_id" else list(dict.fromkeys(found))
    return config


def _number(header: GGUFHeader, key: str, value: Any) -> Any:
    values = value if isinstance(value, list) else [value]
    if not values or any(isinstance(v, str) for v in values) or any(v != values[0] for v in values):
        raise CheckpointError(
            f"{header.path}: {key} is {value!r}; supported: one number, the same for every layer"
        )
    return values[0]


def _dtype(header: GGUFHeader) -> str:
    """Saved dtype: that of the matrices. Block-quantized weights count as bfloat16, as wide as they are."""
    kinds = {tensor.kind for tensor in header.tensors.values() if len(tensor.shape) > 1}
    if not kinds <= _FLOATS.keys():
        return "bfloat16"
    return _FLOATS[max(kinds)] if kinds else "float32"


def _rope_scaling(
    header: GGUFHeader, prefix: str, config: dict[str, Any], factors: np.ndarray | None
) -> dict[str, Any] | None:
    meta = header.metadata
    original = meta.get(prefix + "rope.scaling.original_context_length")
    if factors is not None and not np.all(factors == 1):
        return _llama3_scaling(header, config, factors, original or 8192)
    kind = meta.get(
        prefix + "rope.scaling.type", "linear" if prefix + "rope.scale_linear" in meta else "none"
    )
    factor = meta.get(prefix + "rope.scaling.factor", meta.get(prefix + "rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor in (0, 1)):
        return None
    if meta.get(prefix + "rope.scaling.attn_factor", 1.0) != 1.0:
        raise CheckpointError(
            f"{header.path}: {prefix}rope.scaling.attn_factor other than 1 is not supported"
        )
    scaling = {"rope_type": kind, "factor": factor}
    if original:
        scaling["original_max_position_embeddings"] = original
    for name in ("beta_fast", "beta_slow"):
        if (value := meta.get(f"{prefix}rope.scaling.yarn_{name}")) is not None:
            scaling[name] = value
    return scaling


def _llama3_scaling(
    header: GGUFHeader, config: dict[str, Any], factors: np.ndarray, original: int
) -> dict[str, Any]:
    """The Llama 3 parameters behind the divisors ``factors [D/2]`` that llama.cpp stores instead of them.

    Every published Llama 3 model has low and high frequency factors 1 and 4; other divisors are refused.
    """
    values: dict[str, Any] = {
        "factor": float(np.max(factors)),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    plain = RopeConfig(theta=config["rope_theta"])
    guess = dataclasses.replace(plain, kind="llama3", original_max_position=original, **values)
    dim = config["head_dim"]
    if factors.shape == (dim // 2,):
        expected = plain.frequencies(dim)[0] / guess.frequencies(dim)[0]
        if np.allclose(factors, expected, rtol=1e-4):  # both sides are float32 roundings of the same formula
            return {"rope_type": "llama3", "original_max_position_embeddings": original, **values}
    raise CheckpointError(
        f"{header.path}: 'rope_freqs.weight' of shape {factors.shape} does not follow the llama3 formula "
        f"(low and high frequency factors 1 and 4, original context {original}); "
        "use the safetensors checkpoint of this model"
    )
