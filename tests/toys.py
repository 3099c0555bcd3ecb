"""Toy checkpoints in Hugging Face layout: small enough to write in every test, made of nothing but numpy.

    path = write_toy(tmp_path / "toy", **TOYS["mqa"])
    [ids] = write_script_model(tmp_path / "script", [[b"A", b"hel", b"lo", EOS]])

Depends on numpy, safetensors and tokenizers only, so that scripts/make_goldens.py can use it in an environment without
jaxsched. Weights depend on the options alone: the goldens in tests/goldens were computed from them.
"""

import itertools
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

# Ids 0..255 are the bytes themselves. Rows of the embedding table after the last token have no text, as in many
# real checkpoints, whose vocabulary is padded.
BOS, EOS, IM_START, IM_END, PAD = range(256, 261)
SPECIAL = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
FIRST_EXTRA = 256 + len(SPECIAL)
VOCAB_SIZE = 272

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Name -> options of write_toy. Together they cover every branch of the Llama family; the keys that are new or old
# spellings of one thing (rope_scaling, rope_parameters) are both there on purpose. The seeds are chosen: with these,
# greedy decoding of the goldens does not fall into a short loop and no two best logits come close.
TOYS: dict[str, dict[str, Any]] = {
    "base": {},  # two KV heads for four query heads
    "mha": {"num_kv_heads": 4, "add_bos": True, "seed": 5},
    "gqa3": {"hidden_size": 96, "num_heads": 6, "num_kv_heads": 2, "tied": True, "seed": 2},
    "mqa": {"num_kv_heads": 1, "seed": 5},
    "tied": {"tied": True, "seed": 1},
    "wide_head": {"head_dim": 32, "seed": 7},
    "attention_bias": {"attention_bias": True, "seed": 5},
    "all_biases": {"attention_bias": True, "mlp_bias": True, "tied": True, "shards": 2, "seed": 8},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3": {
        "seed": 16,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "yarn": {
        "seed": 1,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
        },
    },
}


def write_toy(
    path: str | Path,
    *,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate_size: int = 128,
    max_position_embeddings: int = 512,
    tied: bool = False,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    rope_theta: float | None = None,
    rope_scaling: dict[str, Any] | None = None,
    rope_parameters: dict[str, Any] | None = None,
    add_bos: bool = False,
    shards: int = 1,
    seed: int = 0,
) -> Path:
    """Writes a float32 Llama checkpoint with random weights and a byte tokenizer into the folder ``path``.

    ``head_dim`` None is hidden_size / num_heads, and then config.json does not name it. ``shards`` is the number of
    safetensors files; more than one come with an index. Returns ``path``.
    """
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": max_position_embeddings,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
        "attention_bias": attention_bias,
        "mlp_bias": mlp_bias,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "torch_dtype": "float32",
    }
    optional = {
        "head_dim": head_dim,
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "rope_parameters": rope_parameters,
    }
    config |= {key: value for key, value in optional.items() if value is not None}
    tensors = {
        name: _random(name, shape, scale, seed) for name, (shape, scale) in _tensor_shapes(config).items()
    }
    return write_checkpoint(Path(path), config, tensors, add_bos=add_bos, shards=shards)


def _tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], float]]:
    """Name -> shape and standard deviation, chosen so that logits deviate by about 3 and attention is uneven."""
    e, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    d = config.get("head_dim") or e // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    tied = config["tie_word_embeddings"]
    # A tied head favours the token just read; a small embedding keeps it from repeating that token for ever.
    shapes = {
        "model.embed_tokens.weight": ((v, e), 3 * e**-0.5 if tied else 1.0),
        "model.norm.weight": ((e,), 0.1),
    }
    if not tied:
        shapes["lm_head.weight"] = ((v, e), 3 * e**-0.5)
    for i in range(config["num_hidden_layers"]):
        attention, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        shapes[f"model.layers.{i}.input_layernorm.weight"] = ((e,), 0.1)
        shapes[f"model.layers.{i}.post_attention_layernorm.weight"] = ((e,), 0.1)
        for part, out, inner, bias in (
            (attention + "q_proj", q, e, "attention_bias"),
            (attention + "k_proj", kv, e, "attention_bias"),
            (attention + "v_proj", kv, e, "attention_bias"),
            (attention + "o_proj", e, q, "attention_bias"),
            (mlp + "gate_proj", f, e, "mlp_bias"),
            (mlp + "up_proj", f, e, "mlp_bias"),
            (mlp + "down_proj", e, f, "mlp_bias"),
        ):
            shapes[part + ".weight"] = ((out, inner), 1.5 * inner**-0.5)
            if config[bias]:
                shapes[part + ".bias"] = ((out,), 0.25)
    return shapes


def _random(name: str, shape: tuple[int, ...], scale: float, seed: int) -> np.ndarray:
    # RandomState, whose streams numpy promises never to change; one per tensor, so that options do not shift others.
    values = np.random.RandomState(zlib.crc32(f"{seed}/{name}".encode())).standard_normal(shape) * scale
    return (values + 1.0 if "norm" in name else values).astype(np.float32)


def write_script_model(
    path: str | Path, chains: Sequence[Sequence[int | bytes]], *, gap: float = 20.0
) -> list[list[int]]:
    """Writes a checkpoint that emits chosen tokens: after ``chain[i]`` comes ``chain[i + 1]``, whatever came before.

    An item is a token id or the bytes of a token; bytes of length one are the token of that byte, longer ones become
    tokens of their own, which may be any bytes, such as half a character. What has no successor is followed by EOS,
    so a chain that ends in one of its earlier items runs for ever. The successor's logit is ``gap``, all others are 0.

    Returns the ids of the chains: a prompt that ends in the first gives the others. Raises ValueError if a token has
    two successors (only the last token decides what comes next).
    """
    extras = sorted({item for chain in chains for item in chain if isinstance(item, bytes) and len(item) > 1})
    extra_ids = {piece: FIRST_EXTRA + i for i, piece in enumerate(extras)}

    def id_of(item: int | bytes) -> int:
        return item if isinstance(item, int) else item[0] if len(item) == 1 else extra_ids[item]

    ids = [[id_of(item) for item in chain] for chain in chains]
    vocab = -(-(FIRST_EXTRA + len(extras)) // 16) * 16
    successor = np.full(vocab, -1)
    for chain in ids:
        for current, following in itertools.pairwise(chain):
            if successor[current] not in (-1, following):
                raise ValueError(f"token {current} is followed by {successor[current]} and by {following}")
            successor[current] = following
    successor[successor == -1] = EOS

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": vocab,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "torch_dtype": "float32",
    }
    tensors = {name: np.zeros(shape, np.float32) for name, (shape, _) in _tensor_shapes(config).items()}
    for name in tensors:
        if "norm" in name:
            tensors[name] += 1.0
    # Unit rows that are exactly orthogonal, so that no other token gets a share of the logit.
    tensors["model.embed_tokens.weight"] = np.eye(vocab, dtype=np.float32)
    normed = (1 / vocab + config["rms_norm_eps"]) ** -0.5  # what the final norm makes of a unit row
    head = tensors["lm_head.weight"]
    head[successor, np.arange(vocab)] = gap / normed
    write_checkpoint(Path(path), config, tensors, extra_tokens=extras)
    return ids


def byte_alphabet() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    table = {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}
    return [table[b] for b in range(256)]


def make_tokenizer(*, add_bos: bool = False, extra_tokens: Sequence[bytes] = ()) -> Tokenizer:
    """A byte-level BPE without merges. Extra tokens can be decoded, but no text is encoded to them."""
    alphabet = byte_alphabet()
    vocab = {character: byte for byte, character in enumerate(alphabet)}
    vocab |= {token: 256 + i for i, token in enumerate(SPECIAL)}
    for i, piece in enumerate(extra_tokens):
        assert len(piece) > 1, f"{piece!r} has a token already"
        vocab["".join(alphabet[b] for b in piece)] = FIRST_EXTRA + i
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", pair="<|bos|> $A <|bos|> $B", special_tokens=[("<|bos|>", BOS)]
        )
    return tokenizer


def write_checkpoint(
    path: Path,
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    *,
    add_bos: bool = False,
    shards: int = 1,
    extra_tokens: Sequence[bytes] = (),
) -> Path:
    """Writes the files of a checkpoint with the byte tokenizer into the folder ``path``."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "add_bos_token": add_bos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.get("max_position_embeddings", 1024),
        "chat_template": CHAT_TEMPLATE,
    }
    # A chat turn ends in <|im_end|>: like many chat models, only generation_config.json says so.
    generation = {"bos_token_id": BOS, "eos_token_id": [EOS, IM_END], "pad_token_id": PAD}
    for name, content in (
        ("config.json", config),
        ("generation_config.json", generation),
        ("tokenizer_config.json", tokenizer_config),
    ):
        (path / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    make_tokenizer(add_bos=add_bos, extra_tokens=extra_tokens).save(str(path / "tokenizer.json"))

    metadata = {"format": "pt"}  # transformers asks for it
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata)
        return path
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[i::shards]}
        save_file(part, path / file, metadata)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return path
