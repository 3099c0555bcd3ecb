"""Writes toy checkpoints as GGUF files, the way llama.cpp's converter does."""

import json
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
