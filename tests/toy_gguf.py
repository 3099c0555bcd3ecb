"""Writes toy checkpoints as GGUF files, the way llama.cpp's converter does.

``write_toy_gguf`` knows Llama and what a test wants to be odd, ``write_family_gguf`` the other families.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6  # values of tokenizer.ggml.token_type
# A sentencepiece vocabulary: (token, type, score); the score says which merges come first.
SENTENCEPIECE = [
    ("<unk>", UNKNOWN, 0.0),
    ("<s>", CONTROL, 0.0),
    ("</s>", CONTROL, 0.0),
    *((f"<0x{byte:02X}>", BYTE, 0.0) for byte in range(256)),
    *((c, NORMAL, -100.0 - i) for i, c in enumerate("▁helowrd123.")),
    ("▁h", NORMAL, -1.0),
    ("el", NORMAL, -2.0),
    ("lo", NORMAL, -3.0),
    ("ello", NORMAL, -4.0),
    ("▁hello", NORMAL, -5.0),
    ("▁w", NORMAL, -6.0),
    ("<sep>", USER_DEFINED, 0.0),
    ("▁▁", NORMAL, -7.0),
]


def sentencepiece_metadata() -> dict[str, Any]:
    """GGUF metadata of the vocabulary above."""
    tokens, types, scores = (list(column) for column in zip(*SENTENCEPIECE, strict=True))
    key = "tokenizer.ggml."
    return {
        **{key + "model": "llama", key + "tokens": tokens, key + "token_type": types, key + "scores": scores},
        **{key + "bos_token_id": 1, key + "eos_token_id": 2, key + "unknown_token_id": 0},
    }


def gguf_name(name: str) -> str:
    """llama.cpp's name of a Hugging Face tensor."""
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorders each head's rows from (first half, second half) to neighbouring pairs, as llama.cpp rotates them."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a safetensors checkpoint."""
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def write_toy_gguf(
    path: Path,
    folder: Path,
    *,
    quantize: str | None = None,
    architecture: str = "llama",
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    drop: tuple[str, ...] = (),
) -> Path:
    """Converts the checkpoint in ``folder``. ``metadata`` and ``extra`` (tensors) are added, ``drop`` is left out.

    ``quantize`` is the name of a ggml type for the matrices.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta", 10_000.0))
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    add_metadata(writer, metadata or {})
    for name, tensor in {**tensors_of(folder), **(extra or {})}.items():
        if name in drop:
            continue
        if ".q_proj." in name or ".k_proj." in name:
            tensor = permute(tensor, heads if ".q_proj." in name else kv_heads)
        ours = gguf_name(name) if name not in (extra or {}) else name
        kind = getattr(gguf.GGMLQuantizationType, quantize) if quantize and tensor.ndim > 1 else None
        if kind is None:
            writer.add_tensor(ours, tensor)
        else:
            writer.add_tensor(ours, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    finish(writer)
    return path


# Class in config.json -> general.architecture; the order is that of the classes in llama.cpp's conversion/.
GGUF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "MixtralForCausalLM": "llama",
    "SmolLM3ForCausalLM": "smollm3", "GraniteForCausalLM": "granite", "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3", "Qwen2MoeForCausalLM": "qwen2moe", "Qwen3MoeForCausalLM": "qwen3moe",
    "Olmo2ForCausalLM": "olmo2", "OlmoeForCausalLM": "olmoe", "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3", "Phi3ForCausalLM": "phi3", "Starcoder2ForCausalLM": "starcoder2",
    "GPTNeoXForCausalLM": "gptneox", "GPT2LMHeadModel": "gpt2",
}  # fmt: skip
PERMUTED = ("llama", "smollm3", "granite")  # subclasses of the converter's LlamaModel
# Fields that transformers adds to a config.json when the converter reads it.
EPS = {"granite": 1e-6, "llama": 1e-6, "MixtralForCausalLM": 1e-5, "olmo2": 1e-5, "olmoe": 1e-5, "phi3": 1e-5}
THETA = {"MixtralForCausalLM": 1e6}


def write_family_gguf(
    path: Path, folder: Path, *, quantize: str | None = None, metadata: dict[str, Any] | None = None
) -> Path:
    """Converts a checkpoint of any family. ``metadata`` is added, without the architecture's prefix; None drops a key.

    ``quantize`` is the name of a ggml type for the matrices.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = GGUF_ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(path, arch)
    keys = {**family_metadata(arch, config), **(metadata or {})}
    add_metadata(writer, {f"{arch}.{key}": value for key, value in keys.items() if value is not None})
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    kind = getattr(gguf.GGMLQuantizationType, quantize) if quantize else None
    for name, tensor in family_tensors(arch, config, tensors_of(folder)).items():
        if kind is None or tensor.ndim < 2:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    finish(writer)
    return path


def family_metadata(arch: str, c: dict[str, Any]) -> dict[str, Any]:
    """What the converter's class for ``arch`` writes, without the prefix."""
    name = c["architectures"][0]
    if arch == "gpt2":
        return {
            "block_count": c["n_layer"], "context_length": c["n_ctx"], "embedding_length": c["n_embd"],
            "feed_forward_length": 4 * c["n_embd"], "attention.head_count": c["n_head"],
            "attention.layer_norm_epsilon": c.get("layer_norm_epsilon", 1e-5),
        }  # fmt: skip
    heads, hidden = c["num_attention_heads"], c["hidden_size"]
    dim, scaling = c.get("head_dim") or hidden // heads, c.get("rope_scaling") or {}
    keys: dict[str, Any] = {
        "block_count": c["num_hidden_layers"], "context_length": c["max_position_embeddings"],
        "embedding_length": hidden, "feed_forward_length": c["intermediate_size"], "attention.head_count": heads,
    }  # fmt: skip
    if arch == "gptneox":
        return keys | {
            "rope.dimension_count": int(c.get("rotary_pct", 0.25) * (hidden // heads)),
            "use_parallel_residual": c.get("use_parallel_residual", True),
            "attention.layer_norm_epsilon": c.get("layer_norm_eps", 1e-5),
        }
    keys["attention.head_count_kv"] = c["num_key_value_heads"]
    if arch == "starcoder2":
        keys["attention.layer_norm_epsilon"] = c["norm_epsilon"]
    else:
        eps = c.get("rms_norm_eps") or EPS.get(name, EPS.get(arch, 1e-6))
        keys["attention.layer_norm_rms_epsilon"] = eps
    if "head_dim" in c:
        keys |= {"attention.key_length": dim, "attention.value_length": dim}
    if arch == "gemma2":
        return keys | {
            "attn_logit_softcapping": c["attn_logit_softcapping"], "attention.sliding_window": c["sliding_window"],
            "final_logit_softcapping": c["final_logit_softcapping"],
        }  # fmt: skip
    keys["rope.freq_base"] = float(c.get("rope_theta") or THETA.get(name, 1e4))
    if arch == "phi3":
        return keys | phi3_metadata(c)
    if scaling.get("rope_type") == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": scaling["factor"]}
    if arch in PERMUTED:
        keys |= {"rope.dimension_count": dim, "vocab_size": c["vocab_size"]}
    experts = c.get("num_local_experts") or c.get("num_experts")
    keys |= {"expert_count": experts, "expert_used_count": c.get("num_experts_per_tok")}
    keys["expert_feed_forward_length"] = c.get("moe_intermediate_size")
    keys["expert_shared_feed_forward_length"] = c.get("shared_expert_intermediate_size")
    if arch == "gemma3":
        keys |= {
            "attention.sliding_window": c["sliding_window"],
            "rope.freq_base_swa": c["rope_local_base_freq"],
        }
    if arch == "granite":
        keys |= {
            "attention.scale": c["attention_multiplier"], "embedding_scale": c["embedding_multiplier"],
            "residual_scale": c["residual_multiplier"], "logit_scale": c["logits_scaling"],
        }  # fmt: skip
    return keys


def phi3_metadata(c: dict[str, Any]) -> dict[str, Any]:
    most = c["max_position_embeddings"]
    original = c.get("original_max_position_embeddings", most)
    keys: dict[str, Any] = {
        "rope.scaling.original_context_length": original,
        "rope.dimension_count": int(c.get("partial_rotary_factor", 1.0) * c["hidden_size"])
        // c["num_attention_heads"],
        "attention.sliding_window": c.get("sliding_window") or 0,
    }
    if "rope_scaling" in c:
        scale = most / original
        keys["rope.scaling.attn_factor"] = (
            math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        )
    return keys


def family_tensors(arch: str, c: dict[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors by llama.cpp's names, as the converter's ``modify_tensors`` leaves them."""
    layers = c.get("num_hidden_layers") or c["n_layer"]
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names, merged = gguf.get_tensor_name_map(number, layers), stack_experts(tensors)
    found: dict[str, np.ndarray] = {}
    for name, tensor in merged.items():
        ours = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert ours is not None, f"llama.cpp has no name for {name}"
        found[ours] = np.ascontiguousarray(converted(arch, c, name, tensor))
    if arch == "phi3" and "rope_scaling" in c:
        for word in ("long", "short"):
            factors = np.array(c["rope_scaling"][f"{word}_factor"], np.float32)
            found[f"rope_factors_{word}.weight"] = factors
    return found


def converted(arch: str, c: dict[str, Any], name: str, tensor: np.ndarray) -> np.ndarray:
    heads = c.get("num_attention_heads") or c["n_head"]
    if arch in PERMUTED and (".q_proj." in name or ".k_proj." in name):
        return permute(tensor, heads if ".q_proj." in name else c["num_key_value_heads"])
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return tensor + np.float32(1)
    if arch == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
        return tensor.T
    if arch == "gptneox" and ".query_key_value." in name:
        parts = tensor.reshape(heads, 3, -1, *tensor.shape[1:])
        return np.concatenate([parts[:, i].reshape(-1, *tensor.shape[1:]) for i in range(3)])
    return tensor.squeeze() if name.endswith("shared_expert_gate.weight") else tensor


def stack_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts as one tensor for each layer and kind, by the converter's names."""
    stacks: dict[str, dict[int, np.ndarray]] = {}
    rest = {}
    for name, tensor in tensors.items():
        if (
            match := re.fullmatch(r"model\.layers\.(\d+)\.(\w+)\.experts\.(\d+)\.(\w+)\.weight", name)
        ) is None:
            rest[name] = tensor
            continue
        layer, place, expert, part = match.groups()
        mixtral = place == "block_sparse_moe"
        whole = f"layers.{layer}.feed_forward.experts" if mixtral else f"model.layers.{layer}.mlp.experts"
        stacks.setdefault(f"{whole}.{part}.weight", {})[int(expert)] = tensor
    return rest | {name: np.stack([each[i] for i in sorted(each)]) for name, each in stacks.items()}


def write_vocabulary(path: Path, metadata: dict[str, Any]) -> Path:
    """Writes a GGUF file that has metadata and no tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    add_metadata(writer, metadata)
    finish(writer)
    return path


def add_metadata(writer: gguf.GGUFWriter, metadata: dict[str, Any]) -> None:
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
