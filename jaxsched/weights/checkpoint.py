"""Finds a checkpoint, on disk or on the hub, and reads its configuration."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..models import ModelConfig, family_of
from .errors import CheckpointError
from .gguf_source import GGUFSource
from .prequantized import open_prequantized
from .safetensors_source import open_safetensors
from .source import TensorSource

_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(:(?P<file>[^:]+\.gguf))?")
# What a download takes; folders inside a repository hold other formats of the same weights.
_WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
_UNWANTED = ["*/*", "consolidated*"]


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
    path = _locate(model, revision)
    try:
        overrides = dict(hf_overrides or {})
        return _open_gguf(path, overrides) if path.is_file() else _open_folder(path, overrides)
    except CheckpointError:
        raise
    except ValueError as error:  # what the family's config reader refuses
        raise CheckpointError(f"{path}: {error}") from error


def _locate(model: str | os.PathLike[str], revision: str | None) -> Path:
    if not os.fspath(model):
        raise FileNotFoundError("model is an empty name; give a folder, a .gguf file or a Hugging Face id")
    path = Path(model).expanduser()
    if not path.exists():
        match = _HUB_ID.fullmatch(model) if isinstance(model, str) else None
        if match and (match["file"] or not match[0].endswith(".gguf")) and match[0][0] != ".":
            return _download(match["repo"], match["file"], revision)
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


def _download(repo: str, file: str | None, revision: str | None) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    try:
        if file is not None:
            return Path(huggingface_hub.hf_hub_download(repo, file, revision=revision))
        folder = huggingface_hub.snapshot_download(
            repo, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED
        )
    except errors.GatedRepoError as error:
        remedy = f"accept its terms at https://huggingface.co/{repo} and log in with `hf auth login`"
        raise CheckpointError(f"Hugging Face model {repo!r} is gated; {remedy}") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
        if isinstance(error, errors.LocalEntryNotFoundError):
            raise _unreachable(repo, error) from error
        what = "".join((repo, f":{file}" if file else "", f" at revision {revision}" if revision else ""))
        raise CheckpointError(
            f"Hugging Face model {what!r} was not found (and {what!r} is no local path); check the name, "
            "or log in with `hf auth login` if it is private"
        ) from error
    except (errors.HfHubHTTPError, errors.OfflineModeIsEnabled, OSError) as error:
        raise _unreachable(repo, error) from error
    if not (Path(folder) / "config.json").is_file():
        raise CheckpointError(
            f"Hugging Face model {repo!r} has no config.json; for a repository of GGUF files "
            f'name one: "{repo}:<file>.gguf"'
        )
    return Path(folder)


def _unreachable(repo: str, error: Exception) -> CheckpointError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return CheckpointError(
        f"Hugging Face model {repo!r} could not be downloaded and is not in the local cache ({reason}); "
        "check the connection, or pass the path of a folder that holds the checkpoint"
    )


def _open_folder(path: Path, overrides: dict[str, Any]) -> Checkpoint:
    config = _read_json(path / "config.json") | overrides
    generation = path / "generation_config.json"
    generation_config = _read_json(generation) if generation.is_file() else {}
    model_config = _read_model_config(path, config)
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
