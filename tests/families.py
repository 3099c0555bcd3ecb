"""Toy checkpoints of every family but plain Llama (those are in toys.py), one row each.

A row is a config.json. Which tensors the checkpoint has is not said here and not taken from jaxsched: transformers
wrote them down (tests/goldens/families.json, made by scripts/make_goldens.py). Their values follow from name, shape and
seed, so that a checkpoint can be written anywhere.

Depends on numpy, safetensors and tokenizers only, as toys.py does.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from toys import BOS, EOS, PAD, VOCAB_SIZE, write_checkpoint

FAMILY_GOLDENS = Path(__file__).parent / "goldens" / "families.json"

_SHAPE = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "torch_dtype": "float32",
    "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD,
}  # fmt: skip
_NEOX = {key: value for key, value in _SHAPE.items() if key != "num_key_value_heads"}
_LONG = [1.0 + 0.5 * i for i in range(6)]
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3}


def _row(architecture: str, model_type: str, base: dict[str, Any] = _SHAPE, **more: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type, **base, **more}


# Windows are shorter than the prompts of the goldens, and every option of a family is on in some row.
FAMILIES: dict[str, dict[str, Any]] = {
    "smollm3": _row(
        "SmolLM3ForCausalLM", "smollm3", num_hidden_layers=3, no_rope_layer_interval=2, rope_theta=5e4,
        use_sliding_window=True, sliding_window=12, tie_word_embeddings=True, rms_norm_eps=1e-5,
    ),
    "mistral": _row("MistralForCausalLM", "mistral", head_dim=24, sliding_window=12, rms_norm_eps=1e-5, rope_theta=1e5),
    "mistral_full": _row("MistralForCausalLM", "mistral", sliding_window=None, rms_norm_eps=1e-5),
    "qwen2": _row("Qwen2ForCausalLM", "qwen2", tie_word_embeddings=True, sliding_window=64, max_window_layers=2),
    "qwen2_window": _row(
        "Qwen2ForCausalLM", "qwen2", use_sliding_window=True, sliding_window=12, max_window_layers=1, rope_theta=1e5
    ),
    "qwen3": _row("Qwen3ForCausalLM", "qwen3", head_dim=24, attention_bias=True, max_window_layers=2),
    "gemma2": _row(
        "Gemma2ForCausalLM", "gemma2", head_dim=24, sliding_window=12, query_pre_attn_scalar=20, num_hidden_layers=2,
        attn_logit_softcapping=5.0, final_logit_softcapping=8.0, hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh",
    ),
    "gemma3": _row(
        "Gemma3ForCausalLM", "gemma3_text", num_hidden_layers=3, head_dim=24, sliding_window=12,
        sliding_window_pattern=3, query_pre_attn_scalar=20, rope_theta=1e5, rope_local_base_freq=1e3,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
    "phi3": _row(
        "Phi3ForCausalLM", "phi3", sliding_window=48, partial_rotary_factor=0.75, original_max_position_embeddings=12,
        rope_scaling={"type": "longrope", "short_factor": [1.0 + 0.01 * i for i in range(6)], "long_factor": _LONG},
    ),
    "phi3_short": _row(
        "Phi3ForCausalLM", "phi3", max_position_embeddings=2048, original_max_position_embeddings=512,
        rope_scaling={"type": "longrope", "short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [9.0] * 8},
    ),
    "phi3_plain": _row("Phi3ForCausalLM", "phi3", num_key_value_heads=4, rms_norm_eps=1e-5),
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": VOCAB_SIZE, "n_positions": 512,
        "n_ctx": 512, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": None, "activation_function": "gelu_new",
        "scale_attn_by_inverse_layer_idx": True, "bos_token_id": BOS, "eos_token_id": EOS, "torch_dtype": "float32",
    },
    "olmo2": _row("Olmo2ForCausalLM", "olmo2", num_key_value_heads=4),
    "granite": _row(
        "GraniteForCausalLM", "granite", embedding_multiplier=0.8, attention_multiplier=0.4, residual_multiplier=0.7,
        logits_scaling=2.0, attention_bias=True, tie_word_embeddings=True,
    ),
    "starcoder2": _row(
        "Starcoder2ForCausalLM", "starcoder2", sliding_window=12, hidden_act="gelu_pytorch_tanh", norm_epsilon=1e-5,
        tie_word_embeddings=True, use_bias=True,
    ),
    "gpt_neox": _row("GPTNeoXForCausalLM", "gpt_neox", _NEOX, rotary_pct=0.25, rotary_emb_base=1000, hidden_act="gelu"),
    "gpt_neox_serial": _row("GPTNeoXForCausalLM", "gpt_neox", _NEOX, use_parallel_residual=False, attention_bias=False),
    "mixtral": _row("MixtralForCausalLM", "mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "qwen2_moe": _row(
        "Qwen2MoeForCausalLM", "qwen2_moe", **_EXPERTS, moe_intermediate_size=32, shared_expert_intermediate_size=48,
        num_hidden_layers=3, mlp_only_layers=[0], decoder_sparse_step=1, use_sliding_window=True, sliding_window=12,
        max_window_layers=2,
    ),
    "qwen3_moe": _row(
        "Qwen3MoeForCausalLM", "qwen3_moe", **_EXPERTS, moe_intermediate_size=32, head_dim=24, norm_topk_prob=True,
        decoder_sparse_step=2, use_sliding_window=True, sliding_window=12,
    ),
    "olmoe": _row("OlmoeForCausalLM", "olmoe", **_EXPERTS, clip_qkv=1.5, norm_topk_prob=False),
}  # fmt: skip

# Seeds with which greedy decoding of the goldens does not fall into a short loop, and no two best logits come close.
SEEDS = {"gemma2": 8, "gemma3": 12, "gpt2": 3, "granite": 1, "starcoder2": 3}
# A tied head favours the token just read; larger weights keep these from repeating that token for ever.
GAINS = {"gpt2": 3.0, "starcoder2": 3.0, "granite": 2.0}
MAX_LEN = {"phi3_short": 512}  # max_model_len, where it decides about the formula


def write_family_toy(
    path: str | Path, name: str, *, shapes: dict[str, list[int]] | None = None, **changes: Any
) -> Path:
    """Writes the toy ``name`` with changes to its config.json (None drops a field). Weights are the goldens'."""
    config = {**FAMILIES[name], **changes}
    config = {key: value for key, value in config.items() if key not in changes or value is not None}
    if shapes is None:
        shapes = json.loads(FAMILY_GOLDENS.read_text())[name]["tensors"]
    tensors = {key: _weights(key, tuple(shape), name) for key, shape in shapes.items()}
    return write_checkpoint(Path(path), config, tensors)


def _weights(key: str, shape: tuple[int, ...], name: str) -> np.ndarray:
    """Random weights of a size that makes logits deviate by about 3 and attention uneven."""
    config, seed = FAMILIES[name], SEEDS.get(name, 0)
    # RandomState, whose streams numpy promises never to change; one per tensor, so that options do not shift others.
    draw = np.random.RandomState(zlib.crc32(f"{seed}/{key}".encode())).standard_normal(shape)
    width, norm = config.get("hidden_size") or config["n_embd"], "norm" in key or ".ln_" in key
    if key.endswith("bias"):
        return (0.2 * draw).astype(np.float32)
    if norm:
        mean = 0.0 if "gemma" in name else 1.0
        return (0.1 * draw + (mean + 6.0 if "post_" in key and mean == 0 else mean)).astype(np.float32)
    if "wpe" in key:
        return (0.3 * draw).astype(np.float32)
    if "lm_head" in key or "embed_out" in key:
        return (3 * width**-0.5 * draw).astype(np.float32)
    if "layers." not in key and ".h." not in key:  # the embedding table, which may also be the head
        tied = config.get("tie_word_embeddings", name in ("gemma2", "gemma3", "gpt2"))
        return (draw * (3 * width**-0.5 if tied else 1.0)).astype(np.float32)
    inner = shape[0] if name == "gpt2" else shape[-1]
    return (GAINS.get(name, 1.5) * inner**-0.5 * draw).astype(np.float32)
