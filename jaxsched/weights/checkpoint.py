"""Finds a checkpoint, on disk or on the hub, and reads its configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..models import ModelConfig, family_of
from .errors import CheckpointError
from .gguf_source import GGUFSource
from .hub import download, download_description, download_gguf_header, hub_id
from .prequantized import open_prequantized
from .safetensors_source import open_safetensors
from .source import TensorSource


@dataclasses.dataclass(frozen=True, eq=False)
class Checkpoint:
    """One opened checkpoint. Its tensors are not read yet."""

    path: Path  # folder, or the .gguf file; the tokenizer is beside or inside
    config: dict[str, Any]  # config.json, or its equivalent made from GGUF metadata
    generation_config: dict[str, Any]  # generation_config.json, {} where there is none
    model_config: ModelConfig
    eos_token_ids: tuple[int, ...]  # generation_config's first, then config's; each in [0, vocab_size)
    bos_token_id: int | None
    source: TensorSource

    def at_length(self, max_model_len: int | None) -> Checkpoint:
        """The checkpoint for sequences of up to ``max_model_len`` tokens; see ``ModelConfig.at_length``."""
        return dataclasses.replace(self, model_config=self.model_config.at_length(max_model_len))


def open_checkpoint(
    model: str | os.PathLike[str],
    *,
    revision: str | None = None,
    hf_overrides: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Opens a checkpoint without reading its tensors.

    ``model`` is a folder with config.json and safetensors, a .gguf file, a folder with one .gguf file, or a
    hub id: "org/name" or "org/name:file.gguf". ``revision`` (branch, tag or commit) applies to hub ids.
    ``hf_overrides`` replaces fields of config.json; None as a value drops one.

    Raises FileNotFoundError for a path that does not exist, and CheckpointError for a download that fails
    and for a checkpoint that is damaged or not supported.
    """
    return _open(_locate(model, revision), hf_overrides)


@contextlib.contextmanager
def open_description(
    model: str | os.PathLike[str],
    *,
    revision: str | None = None,
    hf_overrides: Mapping[str, Any] | None = None,
) -> Iterator[Checkpoint]:
    """``open_checkpoint`` that downloads no weights. What it gives is good for the ``with`` block.

    Of weights on the hub that are not in the local cache, ``source`` knows the headers, and tensors cannot be read.
    """
    found = hub_id(model)
    if found is None or Path(model).expanduser().exists():
        yield open_checkpoint(model, revision=revision, hf_overrides=hf_overrides)
        return
    repo, file = found
    if file is None:
        path, tensors = download_description(repo, revision)
        yield _open(path, hf_overrides, tensors)
        return
    with tempfile.TemporaryDirectory() as folder:
        yield _open(download_gguf_header(repo, file, revision, Path(folder)), hf_overrides)


def _open(path: Path, overrides: Mapping[str, Any] | None, source: TensorSource | None = None) -> Checkpoint:
    changes = dict(overrides or {})
    try:
        return _open_gguf(path, changes) if path.is_file() else _open_folder(path, changes, source)
    except CheckpointError:
        raise
    except ValueError as error:  # what the family's config reader refuses
        raise CheckpointError(f"{path}: {error}") from error


def _locate(model: str | os.PathLike[str], revision: str | None) -> Path:
    if not os.fspath(model):
        raise FileNotFoundError("model is an empty name; give a folder, a .gguf file or a Hugging Face id")
    path = Path(model).expanduser()
    if not path.exists():
        if (named := hub_id(model)) is not None:
            return download(*named, revision)
        raise FileNotFoundError(
            f"model {os.fspath(model)!r}: no such file or folder (looked for {path.absolute()}); "
            "give a folder with config.json and safetensors files, a .gguf file, "
            'or a Hugging Face id such as "org/name"'
        )
    if revision is not None:
        raise CheckpointError(
            f"revision {revision!r} applies to Hugging Face ids, and {path} is a local path; drop it"
        )
    if path.is_dir() and not (path / "config.json").is_file():
        found = sorted(path.glob("*.gguf"))
        if len(found) == 1:
            return found[0]
        raise CheckpointError(
            f"{path} has no config.json and {len(found)} .gguf files"
            + (f" ({', '.join(f.name for f in found[:10])}); pass the path of one of them" if found else
               "; a checkpoint folder holds config.json and safetensors files, or one .gguf file")
        )  # fmt: skip
    if path.is_file() and path.suffix != ".gguf":
        raise CheckpointError(
            f"{path} is a file, but not a .gguf file; pass the folder that holds config.json"
        )
    return path


def _open_folder(path: Path, overrides: dict[str, Any], source: TensorSource | None) -> Checkpoint:
    config = _read_json(path / "config.json") | overrides
    generation = path / "generation_config.json"
    generation_config = _read_json(generation) if generation.is_file() else {}
    model_config = _read_model_config(path, config)
    if source is None:
        source = open_prequantized(open_safetensors(path), config)
    return _checkpoint(path, config, generation_config, model_config, source)


def _open_gguf(path: Path, overrides: dict[str, Any]) -> Checkpoint:
    source = GGUFSource(path)
    config = source.config | overrides
    return _checkpoint(path, config, {}, _read_model_config(path, config), source)


def _read_model_config(path: Path, config: dict[str, Any]) -> ModelConfig:
    try:
        return family_of(config).read_config(config)
    except (TypeError, ArithmeticError, AttributeError) as error:  # a value of the wrong kind
        raise CheckpointError(
            f"{path}: the configuration is malformed ({error!r}); use the config.json that belongs to these weights"
        ) from error


def _checkpoint(
    path: Path, config: dict[str, Any], generation: dict[str, Any], model: ModelConfig, source: TensorSource
) -> Checkpoint:
    eos: list[int] = []
    for name, origin in (("generation_config.json", generation), ("config", config)):
        value = origin.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if token is not None:
                eos.append(_token(path, f"eos_token_id in {name}", token, model.vocab_size))
    given = [c["bos_token_id"] for c in (config, generation) if c.get("bos_token_id") is not None]
    bos = _token(path, "bos_token_id", given[0], model.vocab_size) if given else None
    return Checkpoint(path, config, generation, model, tuple(dict.fromkeys(eos)), bos, source)


def _token(path: Path, what: str, value: Any, vocab_size: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
        raise CheckpointError(
            f"{path}: {what} is {value!r}; it must be a token id from 0 to {vocab_size - 1}: correct it"
        )
    return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, not an object; download it again")
    return value
