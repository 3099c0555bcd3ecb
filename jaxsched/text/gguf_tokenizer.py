"""Tokenizers from the metadata of GGUF files.

A GGUF file names its vocabulary, merges or scores, and how text is cut before merging (``tokenizer.ggml.pre``).
The cutting rules are those of llama.cpp (``llama-vocab.cpp``) in the form that the models' own tokenizer.json files
have them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from jaxsched.gguf_file import GGUFError, read_gguf_header

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
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tokenizer.ggml.pre -> the rule: "gpt2" (GPT-2's regex), "digits" (each digit alone, then GPT-2's), or a regex.
_PRE = {
    **dict.fromkeys(("default", "gpt-2", "mpt", "olmo", "jais", "phi-2"), "gpt2"),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), "digits"),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), _QWEN2),
    "tekken": _TEKKEN,
}
# Vocabularies that know whole words no merge leads to, and whose files leave add_bos_token out although it is meant.
_WHOLE_WORDS = {name for name, rule in _PRE.items() if rule in (_LLAMA3, _TEKKEN)}


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
        raise TokenizerError(
            f"{path}: tokenizer.ggml.model {kind!r} is not supported; supported: gpt2, llama"
        )
    tokens = _required(path, meta, "tokens", "the vocabulary")
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
    _mark_added(backend, tokens, types)
    add_bos = meta.get(_KEY + "add_bos_token", kind == "llama" or pre in _WHOLE_WORDS)
    add_eos = meta.get(_KEY + "add_eos_token", False)
    surround(
        backend, names.get("bos_token") if add_bos else None, names.get("eos_token") if add_eos else None
    )
    ends = [meta[_KEY + key] for key in _ENDS if _KEY + key in meta]
    return Tokenizer(
        backend,
        special_tokens=names,
        chat_templates=_chat_templates(meta),
        eos_token_ids=list(dict.fromkeys(ends)),
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


def _mark_added(backend: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    def of_type(special: bool, *kinds: int) -> list[AddedToken]:
        chosen = (token for token, kind in zip(tokens, types, strict=True) if kind in kinds and token)
        return [AddedToken(token, special=special, normalized=False) for token in chosen]

    backend.add_special_tokens(of_type(True, _UNKNOWN, _CONTROL))
    backend.add_tokens(of_type(False, _USER_DEFINED))


def _chat_templates(meta: dict[str, Any]) -> dict[str, str]:
    named = {DEFAULT_TEMPLATE: meta.get("tokenizer.chat_template")}
    named |= {n: meta.get(f"tokenizer.chat_template.{n}") for n in meta.get("tokenizer.chat_templates", [])}
    return {name: template for name, template in named.items() if template is not None}


def _byte_level(path: Path, meta: dict[str, Any], tokens: list[str], pre: str) -> tokenizers.Tokenizer:
    """Byte-level BPE (GPT-2 and its descendants)."""
    if pre not in _PRE:
        raise TokenizerError(
            f"{path}: tokenizer.ggml.pre {pre!r} is not supported; supported: {', '.join(sorted(_PRE))}"
        )
    merges = _merges(path, _required(path, meta, "merges", "the merges of a byte-level vocabulary"))
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in _WHOLE_WORDS))
    rule = _PRE[pre]
    if rule == "gpt2":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    else:
        first = (
            pre_tokenizers.Digits(individual_digits=True)
            if rule == "digits"
            else pre_tokenizers.Split(Regex(rule), behavior="isolated")
        )
        rest = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule == "digits")
        backend.pre_tokenizer = pre_tokenizers.Sequence([first, rest])
    if pre == "qwen2":
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
