"""Tokenizers in Hugging Face layout: tokenizer.json and what refines it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from .tokenizer import DEFAULT_TEMPLATE, Tokenizer, TokenizerError

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA = ("additional_special_tokens", "extra_special_tokens")


def hf_tokenizer(folder: Path) -> Tokenizer:
    """Reads tokenizer.json, then tokenizer_config.json, special_tokens_map.json and the chat template's file.

    tokenizer.json says how text is split; the others add tokens, name the special ones, and may set
    ``add_bos_token`` and ``add_eos_token``, which then replace its post-processor, as in transformers.
    Raises TokenizerError naming the file.
    """
    file = folder / "tokenizer.json"
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(
            f"{file} cannot be read ({error}); download it again or update tokenizers"
        ) from error
    try:
        return _refined(backend, folder)
    except (KeyError, TypeError, AttributeError, UnicodeError) as error:
        raise TokenizerError(
            f"{folder}: tokenizer_config.json or a file beside it is malformed ({error!r}); download it again"
        ) from error


def _refined(backend: tokenizers.Tokenizer, folder: Path) -> Tokenizer:
    """What the files beside tokenizer.json add to it."""
    config = _read_json(folder / "tokenizer_config.json")
    named = {
        **_read_json(folder / "special_tokens_map.json"),
        **{k: v for k, v in config.items() if v is not None},
    }
    special = {name: _content(named[name]) for name in _NAMES if named.get(name)}
    _add_tokens(backend, config, named, special, folder)
    flags = {name: config.get(name) for name in ("add_bos_token", "add_eos_token")}
    if any(value is not None for value in flags.values()):
        surround(
            backend, *(special.get(f"{n}_token") if flags[f"add_{n}_token"] else None for n in ("bos", "eos"))
        )
    return Tokenizer(backend, special_tokens=special, chat_templates=_chat_templates(folder, config))


def surround(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Makes ``encode`` put these tokens before and after the text, and nothing else.

    Raises TokenizerError for a token that is not in the vocabulary.
    """
    ids = {token: backend.token_to_id(token) for token in (bos, eos) if token is not None}
    for token, found in ids.items():
        if found is None:
            raise TokenizerError(f"token {token!r}, to be added to every text, is not in the vocabulary")
    single = [*([f"{bos}:0"] if bos else []), "$A:0", *([f"{eos}:0"] if eos else [])]
    pair = [*single, *([f"{bos}:1"] if bos else []), "$B:1", *([f"{eos}:1"] if eos else [])]
    backend.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=list(ids.items())
    )


def _add_tokens(
    backend: tokenizers.Tokenizer,
    config: dict[str, Any],
    named: dict[str, Any],
    special: dict[str, str],
    folder: Path,
) -> None:
    listed = config.get("added_tokens_decoder") or {}
    known = set(backend.get_added_tokens_decoder())
    try:
        missing = [
            _added(value)
            for key, value in sorted(listed.items(), key=lambda i: int(i[0]))
            if int(key) not in known
        ]
    except (ValueError, TypeError, KeyError) as error:
        raise TokenizerError(
            f"{folder}/tokenizer_config.json: added_tokens_decoder is malformed ({error!r})"
        ) from error
    for token in missing:  # one by one: special and plain tokens take ids in one order
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
    extra = [value for key in _EXTRA for value in _values(named.get(key))]
    have = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    names = dict.fromkeys([*special.values(), *map(_content, extra)])
    backend.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in names if name not in have]
    )


def _values(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else list(value or [])


def _content(value: Any) -> str:
    return value["content"] if isinstance(value, dict) else str(value)


def _added(value: dict[str, Any]) -> AddedToken:
    options = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(value["content"], **{name: value[name] for name in options if name in value})


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Name -> template. A file of its own wins over tokenizer_config.json, as in transformers."""
    for value in (
        config.get("chat_template"),
        _read_json(folder / "chat_template.json").get("chat_template"),
    ):
        if isinstance(value, str):
            templates = {DEFAULT_TEMPLATE: value}
            break
        if isinstance(value, list):
            templates = {item["name"]: item["template"] for item in value}
            break
        if isinstance(value, dict):
            templates = dict(value)
            break
    else:
        templates = {}
    if (single := folder / "chat_template.jinja").is_file():
        templates[DEFAULT_TEMPLATE] = single.read_text(encoding="utf-8")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    return templates


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
        if not isinstance(value, dict):
            raise ValueError("not a JSON object")
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not valid JSON ({error}); download it again") from error
    return value
