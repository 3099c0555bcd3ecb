"""GGUF architectures: how each one's metadata is said in the words of a Hugging Face config.json.

What a file leaves out because llama.cpp knows it stands here as ``fixed`` or in the functions: facts from
https://github.com/ggml-org/llama.cpp, where ``conversion/`` writes the files and ``src/models/`` reads them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxsched.gguf_file import GGUFHeader, end_tokens

from ..models.config import MAX_EXPERTS, MAX_LAYERS
from .errors import CheckpointError
from .gguf_metadata import Metadata
from .gguf_rope import rope_words

MAX_HEADS, MAX_WIDTH = 65536, 2**24  # a file that says more is corrupt
_COMMON = {
    "num_hidden_layers": ("block_count", MAX_LAYERS),
    "max_position_embeddings": ("context_length", 2**31),
    "hidden_size": ("embedding_length", MAX_WIDTH),
    "intermediate_size": ("feed_forward_length", MAX_WIDTH),
    "num_attention_heads": ("attention.head_count", MAX_HEADS),
}
_RMS, _LAYER = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
_FLOATS = {0: "float32", 1: "float16", 30: "bfloat16"}  # ggml's numbers of the types that are not quantized
_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
_BIAS = {"attention_bias": ("attn_q.bias", "attn_qkv.bias")}
_BIASES = {**_BIAS, "mlp_bias": ("ffn_gate.bias",)}
Words = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Arch:
    """One value of ``general.architecture``."""

    architecture: str  # class name in config.json
    eps: tuple[str, str] = ("rms_norm_eps", _RMS)  # word and key of the norms' epsilon
    words: Mapping[str, str] = MappingProxyType({})  # further words: their keys, where the file has them
    fixed: Mapping[str, Any] = MappingProxyType({})  # words that follow from the architecture
    biases: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    """Words that say whether there are biases: tensors of the first layer, any of which shows it."""
    more: Callable[[Metadata, Words], Words] | None = None  # words that take more than a look-up
    permuted: bool = False  # rows of q and k are reordered, as llama.cpp rotates neighbouring numbers
    norm_offset: float = 0.0  # is added to the weights of norms
    rope: bool = True


def gguf_architecture(header: GGUFHeader) -> Arch:
    """The row of a file.

    Raises CheckpointError for a file that is no model or of one not supported, and for one of several parts.
    """
    name, kind = header.metadata.get("general.architecture"), header.metadata.get("general.type", "model")
    if not isinstance(name, str) or kind != "model":
        what = "lacks general.architecture" if kind == "model" else f"is of type {kind!r} (general.type)"
        raise CheckpointError(f"{header.path} {what}, so it holds no model; pass a model file")
    parts = header.metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise CheckpointError(
            f"{header.path} is one of {parts} parts; only single GGUF files are read: join the parts with llama.cpp's "
            "llama-gguf-split --merge"
        )
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{header.path}: general.architecture {name!r} is not supported; supported: "
            f"{', '.join(sorted(ARCHITECTURES))}"
        )
    return ARCHITECTURES[name]


def gguf_config(header: GGUFHeader, factors: Mapping[str, np.ndarray]) -> Words:
    """A config.json for the model in the file.

    ``factors`` are the tensors with divisors of RoPE's frequencies that the file has, float32, by their names.
    Raises CheckpointError naming the key that is missing, or is not known, or whose value is not supported.
    """
    row = gguf_architecture(header)
    meta = Metadata(header, header.metadata["general.architecture"])
    if not meta.has("token_embd.weight"):
        raise meta.error("lacks the tensor 'token_embd.weight'; it is not a complete model")
    words: Words = {"architectures": [row.architecture], "model_type": meta.prefix[:-1]}
    words |= {word: meta.count(key, most) for word, (key, most) in _COMMON.items()}
    heads, hidden = words["num_attention_heads"], words["hidden_size"]
    words["num_key_value_heads"] = meta.count("attention.head_count_kv", MAX_HEADS, heads)
    words["head_dim"] = meta.count("attention.key_length", MAX_WIDTH, max(hidden // heads, 1))
    meta.only("attention.value_length", words["head_dim"])
    meta.only("attention.causal", True)
    words[row.eps[0]] = meta.need(row.eps[1])
    words["vocab_size"] = header.tensors["token_embd.weight"].shape[0]
    words["tie_word_embeddings"] = not meta.has("output.weight")
    words["dtype"] = _dtype(header)
    words |= {word: any(meta.has(f"blk.0.{n}") for n in names) for word, names in row.biases.items()}
    found = {word: meta.number(key) for word, key in row.words.items()}
    words |= {**row.fixed, **{word: value for word, value in found.items() if value is not None}}
    if row.rope:
        words |= rope_words(meta, words, factors, whole=row.permuted)
    if row.more is not None:
        words |= row.more(meta, words)
    words["bos_token_id"] = header.metadata.get("tokenizer.ggml.bos_token_id")
    words["eos_token_id"] = end_tokens(header.metadata) or None
    meta.done()
    return {word: value for word, value in words.items() if value is not None}


def _dtype(header: GGUFHeader) -> str:
    """Saved dtype: that of the matrices. Block-quantized weights count as bfloat16, as wide as they are."""
    kinds = {tensor.kind for tensor in header.tensors.values() if len(tensor.shape) > 1}
    if not kinds <= _FLOATS.keys():
        return "bfloat16"
    return _FLOATS[max(kinds)] if kinds else "float32"


def _experts(meta: Metadata, count: str, normalized: bool) -> Words:
    """The routed MLPs' number of experts, by the word ``count``, and how many each token goes to."""
    meta.only("expert_gating_func", 1, 0)  # softmax, or not said
    meta.only("expert_weights_norm", normalized)
    meta.only("expert_weights_scale", 1.0, 0.0)
    for key in ("expert_group_count", "expert_group_used_count"):
        meta.only(key, 1, 0)
    return {
        count: meta.count("expert_count", MAX_EXPERTS),
        "num_experts_per_tok": meta.need("expert_used_count"),
    }


def _llama(meta: Metadata, words: Words) -> Words:
    """Mistral and Mixtral go by the name of llama; their windows and experts tell."""
    more: Words = {}
    if window := meta.number(_WINDOW):
        more |= {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    if meta.number("expert_count"):
        more |= {"architectures": ["MixtralForCausalLM"], **_experts(meta, "num_local_experts", True)}
    else:
        meta.only("expert_used_count", 0)
    return more


def _qwen_moe(meta: Metadata, words: Words) -> Words:
    normalized = meta.prefix == "qwen3moe."
    more = _experts(meta, "num_experts", normalized) | {"norm_topk_prob": normalized}
    more["moe_intermediate_size"] = _width(meta, "expert_feed_forward_length", "ffn_down_exps.weight")
    if not normalized:
        shared = _width(meta, "expert_shared_feed_forward_length", "ffn_down_shexp.weight")
        more["shared_expert_intermediate_size"] = shared
    return more


def _width(meta: Metadata, key: str, tensor: str) -> Any:
    """The width of an expert; older files leave it to the tensors."""
    shapes = (t.shape for name, t in meta.header.tensors.items() if name.endswith("." + tensor))
    width = meta.number(key) or next((shape[-1] for shape in shapes if shape), None)
    if width is None:
        raise meta.error(f"lacks the metadata {meta.prefix + key!r}; the file is incomplete")
    return width


def _olmoe(meta: Metadata, words: Words) -> Words:
    return _experts(meta, "num_experts", False) | {"norm_topk_prob": False}


def _gemma(meta: Metadata, words: Words) -> Words:
    """Which layers have a window: every other one in Gemma 2, five of six in Gemma 3, or as the file says."""
    third, count = meta.prefix == "gemma3.", words["num_hidden_layers"]
    window = meta.number(_WINDOW, None if third else 4096)
    pattern = meta.get(_PATTERN, 6 if third else 2)
    if isinstance(pattern, list) and len(pattern) >= count:
        slides = [bool(x) for x in pattern[:count]]
    elif isinstance(pattern, int) and pattern >= 0:  # 0: all layers
        slides = [not pattern or i % pattern < pattern - 1 for i in range(count)]
    else:
        raise meta.error(
            f"{meta.prefix}{_PATTERN} is {pattern!r:.80}; it must be a number, or one for each layer"
        )
    # The scale of attention is not in the file: the largest model of each generation has another one.
    largest = count == (62 if third else 46)
    scalar = words["hidden_size"] // words["num_attention_heads"] if largest else words["head_dim"]
    if scale := meta.number("attention.scale"):
        scalar = scale**-2
    more = {
        "sliding_window": window or None,
        "layer_types": ["sliding_attention" if window and x else "full_attention" for x in slides],
        "query_pre_attn_scalar": scalar,
        "final_logit_softcapping": meta.number("final_logit_softcapping") or None,
    }
    if third:
        return more | {"rope_local_base_freq": meta.number("rope.freq_base_swa", 10_000.0)}
    meta.only("rope.freq_base_swa", words["rope_theta"])
    if more["final_logit_softcapping"] is None:
        del more["final_logit_softcapping"]  # the family's default
    return more


def _granite(meta: Metadata, words: Words) -> Words:
    meta.only("rope.scaling.finetuned", True)  # here false means: no rotation
    return {
        "attention_multiplier": meta.number("attention.scale") or words["head_dim"] ** -0.5,
        "embedding_multiplier": meta.number("embedding_scale") or 1.0,
        "residual_multiplier": meta.number("residual_scale") or 1.0,
        "logits_scaling": meta.number("logit_scale") or 1.0,
    }


def _phi3(meta: Metadata, words: Words) -> Words:
    """Old files leave out the window, which then follows from the model: of 4096 tokens, or of 128k."""
    window, context = meta.number(_WINDOW), words["max_position_embeddings"]
    if window is None:
        if context not in (4096, 131072) or words["num_hidden_layers"] not in (32, 40):
            raise meta.error(f"lacks the metadata {meta.prefix + _WINDOW!r}; convert the model again")
        window = 2047 if context == 4096 else 0
    return {"sliding_window": window or None}


def _starcoder2(meta: Metadata, words: Words) -> Words:
    """The window is never in the file; all published models have 16384 positions and a window of 4096."""
    return {
        "sliding_window": meta.number(_WINDOW, 4096 if words["max_position_embeddings"] == 16384 else 0)
        or None
    }


def _gpt2(meta: Metadata, words: Words) -> Words:
    """This family has words of its own, and none for key heads."""
    if words["num_key_value_heads"] != words["num_attention_heads"]:
        raise meta.error(
            f"{meta.prefix}attention.head_count_kv differs from head_count, which GPT-2 does not have"
        )
    none = dict.fromkeys(("num_key_value_heads", "head_dim", "intermediate_size"))
    return none | {"n_inner": words["intermediate_size"]}


ARCHITECTURES: dict[str, Arch] = {
    "llama": Arch("LlamaForCausalLM", biases=_BIASES, more=_llama, permuted=True),
    "smollm3": Arch("SmolLM3ForCausalLM", fixed={"no_rope_layer_interval": 4}, biases=_BIASES, permuted=True),
    "granite": Arch("GraniteForCausalLM", biases=_BIASES, more=_granite, permuted=True),
    "qwen2": Arch("Qwen2ForCausalLM"),
    "qwen3": Arch("Qwen3ForCausalLM", biases=_BIAS),
    "qwen2moe": Arch("Qwen2MoeForCausalLM", biases={"qkv_bias": _BIAS["attention_bias"]}, more=_qwen_moe),
    "qwen3moe": Arch("Qwen3MoeForCausalLM", biases=_BIAS, more=_qwen_moe),
    "olmo2": Arch("Olmo2ForCausalLM", biases=_BIAS),
    "olmoe": Arch("OlmoeForCausalLM", words={"clip_qkv": "attention.clamp_kqv"}, biases=_BIAS, more=_olmoe),
    "gemma2": Arch(
        "Gemma2ForCausalLM", words={"attn_logit_softcapping": "attn_logit_softcapping"}, biases=_BIAS, more=_gemma,
        norm_offset=1.0,
    ),
    "gemma3": Arch("Gemma3ForCausalLM", biases=_BIAS, more=_gemma, norm_offset=1.0),
    "phi3": Arch("Phi3ForCausalLM", more=_phi3),
    "starcoder2": Arch(
        "Starcoder2ForCausalLM", ("norm_epsilon", _LAYER), biases={"use_bias": ("ffn_down.bias",)}, more=_starcoder2
    ),
    "gptneox": Arch(
        "GPTNeoXForCausalLM", ("layer_norm_eps", _LAYER), words={"use_parallel_residual": "use_parallel_residual"},
        biases={"attention_bias": ("attn_qkv.bias",)},
    ),
    "gpt2": Arch("GPT2LMHeadModel", ("layer_norm_epsilon", _LAYER), more=_gpt2, rope=False),
}  # fmt: skip
"""``general.architecture`` -> how it is read."""
