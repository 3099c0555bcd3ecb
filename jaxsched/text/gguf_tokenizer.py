"""Tokenizers from the metadata of GGUF files.

A GGUF file names its vocabulary, merges or scores, and how text is cut before merging (``tokenizer.ggml.pre``).
The cutting rules are those of llama.cpp (``llama-vocab.cpp``) in the form that the models' own tokenizer.json files
have them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from jaxsched.gguf_file import GGUFError, end_tokens, read_gguf_header

from .hf_tokenizer import surround
from .tokenizer import DEFAULT_TEMPLATE, Tokenizer, TokenizerError

_KEY = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # values of token_type
_SPACE = "\u2581"  # sentencepiece's mark for a space
_NAMES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


@dataclasses.dataclass(frozen=True)
class _Rule:
    """How a byte-level vocabulary cuts text before it merges: by each regex in turn, what it finds standing alone."""

    cuts: tuple[str, ...] = ()
    gpt2: bool = False  # then by GPT-2's regex
    whole: bool = (
        False  # words of the vocabulary that no merge leads to are found; the file leaves out a BOS it means
    )
    nfc: bool = False  # text is composed first


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CL100K = (
    _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _CL100K.replace(r"\p{N}{1,3}", r"\p{N}")
_LOWER, _UPPER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}", r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CONTRACTION}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _O200K.replace(_CONTRACTION + "?", "").replace(r"\p{N}{1,3}", r"\p{N}")
_SEED = _QWEN2.replace(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}\r\n]+")
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# tokenizer.ggml.pre -> the rule. Files without it, or with "default", were converted before there was a choice.
_PRE = {
    **dict.fromkeys(("default", "gpt-2", "jais", "phi-2", "trillion", "mellum", "a.x-4.0"), _Rule(gpt2=True)),
    **dict.fromkeys(("mpt", "olmo"), _Rule(gpt2=True, nfc=True)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"), _Rule((r"\p{N}",), gpt2=True)
    ),
    "command-r": _Rule((r"\p{N}",), gpt2=True, nfc=True),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        _Rule((_CL100K,), whole=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Rule((_CL100K,))),
    "qwen2": _Rule((_QWEN2,), nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "megrez", "kormo"), _Rule((_QWEN2,))),
    "tekken": _Rule((_TEKKEN,), whole=True),
    **dict.fromkeys(("gpt-4o", "llama4"), _Rule((_O200K,))),
    "seed-coder": _Rule((_SEED,)),
    "deepseek-coder": _Rule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "deepseek-v3": _Rule(_DEEPSEEK3),
}
# Kinds of vocabularies that llama.cpp has besides.
_OTHER = {
    "bert": "WordPiece",
    "t5": "Unigram",
    "rwkv": "RWKV's trie",
    "plamo2": "PLaMo's",
    "gemma4": "Gemma 4's BPE",
}
# Phi-3 drops spaces behind its special tokens, but for these. No key of the file says so.
_KEEP_SPACES = ("<unk>", "<s>", "<|endoftext|>")


def gguf_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer in a GGUF file; None when the file has none.

    Raises TokenizerError for metadata that is missing, inconsistent or of an unsupported kind.
    """
    try:
        meta = read_gguf_header(path).metadata
    except GGUFError as error:
        raise TokenizerError(str(error)) from error
    kind = meta.get(_KEY + "model")
    if kind is None or kind in ("none", "no_vocab"):
        return None
    if kind not in ("gpt2", "llama"):
        what = f" ({_OTHER[kind]})" if isinstance(kind, str) and kind in _OTHER else ""
        raise TokenizerError(
            f"{path}: tokenizer.ggml.model {kind!r}{what} is not supported; supported: gpt2, llama; give the model "
            "token ids, or use its safetensors checkpoint"
        )
    tokens = _tokens(path, meta)
    types = meta.get(_KEY + "token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise TokenizerError(
            f"{path}: {len(tokens)} tokens, but {len(types)} entries in token_type; the file is corrupt"
        )
    names = {name: _token(path, meta, key, tokens) for name, key in _NAMES.items() if _KEY + key in meta}
    pre = meta.get(_KEY + "pre", "default")
    try:
        backend = (
            _byte_level(path, meta, tokens, pre)
            if kind == "gpt2"
            else _sentencepiece(path, meta, tokens, types)
        )
    except TokenizerError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"{path}: vocabulary and merges do not fit together ({error})") from error
    strip = kind == "llama" and meta.get("general.architecture") == "phi3"
    _mark_added(backend, tokens, types, _KEEP_SPACES if strip else None)
    add_bos = meta.get(_KEY + "add_bos_token", kind == "llama" or _PRE[pre].whole)
    add_eos = meta.get(_KEY + "add_eos_token", False)
    surround(
        backend, names.get("bos_token") if add_bos else None, names.get("eos_token") if add_eos else None
    )
    return Tokenizer(
        backend,
        special_tokens=names,
        chat_templates=_chat_templates(meta),
        eos_token_ids=end_tokens(meta),
    )


def _required(path: Path, meta: dict[str, Any], key: str, what: str) -> list[Any]:
    value = meta.get(_KEY + key)
    if not isinstance(value, list) or not value:
        raise TokenizerError(f"{path} lacks {_KEY + key} ({what}); use a complete GGUF file of this model")
    return value


def _token(path: Path, meta: dict[str, Any], key: str, tokens: list[str]) -> str:
    index = meta[_KEY + key]
    if not isinstance(index, int) or not 0 <= index < len(tokens):
        raise TokenizerError(f"{path}: {_KEY + key} is {index!r}; it must be from 0 to {len(tokens) - 1}")
    return tokens[index]


def _tokens(path: Path, meta: dict[str, Any]) -> list[str]:
    """The vocabulary. Empty tokens are given a name, as in llama.cpp; no other may come twice."""
    given = _required(path, meta, "tokens", "the vocabulary")
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(given)]
    first: dict[str, int] = {}
    for index, token in enumerate(tokens):
        if first.setdefault(token, index) != index:
            raise TokenizerError(
                f"{path}: token {token!r} is in tokenizer.ggml.tokens twice, as {first[token]} and {index}; the file "
                "is corrupt"
            )
    return tokens


def _mark_added(
    backend: tokenizers.Tokenizer, tokens: list[str], types: list[int], keep_spaces: Collection[str] | None
) -> None:
    """Tokens that are found in text before it is cut. ``keep_spaces``: all but these take the spaces behind them."""

    def strips(token: str) -> bool:
        return keep_spaces is not None and token not in keep_spaces

    def of_type(special: bool, *kinds: int) -> list[AddedToken]:
        chosen = (token for token, kind in zip(tokens, types, strict=True) if kind in kinds)
        return [AddedToken(t, special=special, normalized=False, rstrip=strips(t)) for t in chosen]

    backend.add_special_tokens(of_type(True, _UNKNOWN, _CONTROL))
    backend.add_tokens(of_type(False, _USER_DEFINED))


def _chat_templates(meta: dict[str, Any]) -> dict[str, str]:
    """Name -> template. The list tokenizer.chat_templates has the same names as the keys, so it is not needed."""
    prefix = "tokenizer.chat_template."
    named = {DEFAULT_TEMPLATE: meta.get("tokenizer.chat_template")}
    named |= {key.removeprefix(prefix): value for key, value in meta.items() if key.startswith(prefix)}
    return {name: template for name, template in named.items() if isinstance(template, str)}


def _byte_level(path: Path, meta: dict[str, Any], tokens: list[str], pre: str) -> tokenizers.Tokenizer:
    """Byte-level BPE (GPT-2 and its descendants)."""
    if pre not in _PRE:
        raise TokenizerError(
            f"{path}: tokenizer.ggml.pre {pre!r} is not supported; supported: {', '.join(sorted(_PRE))}"
        )
    merges = _merges(path, _required(path, meta, "merges", "the merges of a byte-level vocabulary"))
    vocab, rule = {token: index for index, token in enumerate(tokens)}, _PRE[pre]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=rule.whole))
    steps: list[Any] = [pre_tokenizers.Split(Regex(cut), behavior="isolated") for cut in rule.cuts]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.gpt2))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _merges(path: Path, lines: list[str]) -> list[tuple[str, str]]:
    pairs = []
    for line in lines:
        left, space, right = line.partition(" ")
        if not space or " " in right:
            raise TokenizerError(
                f"{path}: {line!r} in tokenizer.ggml.merges is not two tokens; the file is corrupt"
            )
        pairs.append((left, right))
    return pairs


def _sentencepiece(
    path: Path, meta: dict[str, Any], tokens: list[str], types: list[int]
) -> tokenizers.Tokenizer:
    """Sentencepiece BPE with byte fallback (Llama 2 and its descendants)."""
    vocab = {token: index for index, token in enumerate(tokens)}
    if _KEY + "merges" in meta:
        merges = _merges(path, meta[_KEY + "merges"])
    else:
        scores = _required(path, meta, "scores", "the scores of a sentencepiece vocabulary")
        if len(scores) != len(tokens):
            raise TokenizerError(
                f"{path}: {len(tokens)} tokens, but {len(scores)} scores; the file is corrupt"
            )
        normal = {t: s for t, s, kind in zip(tokens, scores, types, strict=True) if kind == _NORMAL}
        merges = merges_from_scores(normal)
    unknown = meta.get(_KEY + "unknown_token_id", 0)
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    )
    prefix = meta.get(_KEY + "add_space_prefix", True)
    replace = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if prefix else replace
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def merges_from_scores(scores: dict[str, float]) -> list[tuple[str, str]]:
    """The merges that a sentencepiece vocabulary implies: every way to split a token in two, best score first.

    Among the splits of one token those with the longer left part come first, as in transformers.
    """
    found = [
        (score, cut, token[:cut], token[cut:])
        for token, score in scores.items()
        for cut in range(1, len(token))
        if token[:cut] in scores and token[cut:] in scores
    ]
    found.sort(key=lambda merge: merge[:2], reverse=True)
    return [(left, right) for _, _, left, right in found]
