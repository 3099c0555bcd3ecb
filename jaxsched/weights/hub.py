"""The Hugging Face hub: downloads, and descriptions of models without their weights."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxsched.gguf_file import GGUFError, read_gguf_header

from .errors import CheckpointError

_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(:(?P<file>[^:]+\.gguf))?")
# What a download takes; folders inside a repository hold other formats of the same weights.
_DESCRIPTION = ["*.json", "*.jinja", "tokenizer.model"]
_WEIGHTS = ["*.safetensors"]
_UNWANTED = ["*/*", "consolidated*"]
_FIRST = 8 << 20  # bytes of a GGUF file that are asked for first; the vocabulary is in them
_LAST = 256 << 20  # and at most


def hub_id(model: str | os.PathLike[str]) -> tuple[str, str | None] | None:
    """Repository and .gguf file of a hub id, "org/name" or "org/name:file.gguf"; None if it cannot be one."""
    match = _HUB_ID.fullmatch(model) if isinstance(model, str) else None
    if match is None or match[0][0] == "." or (not match["file"] and match[0].endswith(".gguf")):
        return None
    return match["repo"], match["file"]


def download(repo: str, file: str | None, revision: str | None) -> Path:
    """The folder of a repository, or one of its .gguf files. Offline: what is in the local cache.

    Raises CheckpointError.
    """
    import huggingface_hub

    with _asking(repo, file, revision):
        if file is not None:
            return Path(huggingface_hub.hf_hub_download(repo, file, revision=revision))
        wanted = [*_DESCRIPTION, *_WEIGHTS]
        folder = huggingface_hub.snapshot_download(
            repo, revision=revision, allow_patterns=wanted, ignore_patterns=_UNWANTED
        )
    return _with_config(repo, folder)


def download_description(repo: str, revision: str | None) -> tuple[Path, RemoteTensors | None]:
    """Configuration and tokenizer of a repository, and what its safetensors files say that they hold.

    The second is None where the weights are in the local cache already. Raises CheckpointError.
    """
    import huggingface_hub
    from huggingface_hub import errors

    with _asking(repo, None, revision):
        folder = _with_config(
            repo,
            huggingface_hub.snapshot_download(
                repo, revision=revision, allow_patterns=_DESCRIPTION, ignore_patterns=_UNWANTED
            ),
        )
        if _has_weights(folder):
            return folder, None
        try:
            found = huggingface_hub.get_safetensors_metadata(repo, revision=revision)
        except errors.NotASafetensorsRepoError as error:
            raise CheckpointError(
                f'Hugging Face model {repo!r} has no safetensors files; a GGUF file is named so: "{repo}:<file>.gguf"'
            ) from error
        except errors.SafetensorsParsingError as error:
            raise CheckpointError(
                f"Hugging Face model {repo!r} has damaged safetensors files ({error})"
            ) from error
    return folder, RemoteTensors(repo, found)


class RemoteTensors:
    """A TensorSource of a repository whose weights are not here: names, shapes and sizes, but nothing to read."""

    def __init__(self, repo: str, found: Any):
        self.repo, self.nbytes = repo, 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, str] = {}
        for file, header in found.files_metadata.items():
            for name, tensor in header.tensors.items():
                self._shapes[name], self._files[name] = tuple(tensor.shape), file
                self.nbytes += tensor.data_offsets[1] - tensor.data_offsets[0]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self._shapes)

    def file_of(self, name: str) -> Path:
        return Path(self._files[name])

    def read(self, name: str) -> np.ndarray:
        raise CheckpointError(f"tensor {name!r} of Hugging Face model {self.repo!r} has not been downloaded")


def download_gguf_header(repo: str, file: str, revision: str | None, folder: Path) -> Path:
    """A .gguf file in ``folder`` with the header and the size of the one on the hub, and zeros for weights.

    Divisors of rotary frequencies, which are tensors but describe the model, are there too. If the file is in the local
    cache, that is returned. Raises CheckpointError.
    """
    import huggingface_hub

    with _asking(repo, file, revision):
        cached = huggingface_hub.try_to_load_from_cache(repo, file, revision=revision)
        if isinstance(cached, str):
            return Path(cached)
        path = folder / Path(file).name
        files = huggingface_hub.HfFileSystem()
        with files.open(f"{repo}/{file}", "rb", revision=revision) as remote, open(path, "w+b") as local:
            size = remote.seek(0, os.SEEK_END)
            header = None
            while header is None:
                have = local.seek(0, os.SEEK_END)
                remote.seek(have)
                local.write(remote.read(max(have, _FIRST)))
                local.flush()
                try:
                    header = read_gguf_header(path)
                except GGUFError as error:
                    if local.tell() >= min(size, _LAST) or "truncated" not in str(error):
                        raise CheckpointError(
                            str(error).replace(str(path), f"Hugging Face model {repo}:{file}")
                        ) from error
            local.truncate(size)
            for name, tensor in header.tensors.items():
                if name.startswith("rope_"):
                    remote.seek(tensor.offset)
                    local.seek(tensor.offset)
                    local.write(remote.read(4 * int(np.prod(tensor.shape))))
    return path


@contextlib.contextmanager
def _asking(repo: str, file: str | None, revision: str | None) -> Iterator[None]:
    """Says in our words what the hub refuses."""
    from huggingface_hub import errors

    what = "".join((repo, f":{file}" if file else "", f" at revision {revision}" if revision else ""))
    try:
        yield
    except errors.GatedRepoError as error:
        remedy = f"accept its terms at https://huggingface.co/{repo} and log in with `hf auth login`"
        raise CheckpointError(f"Hugging Face model {repo!r} is gated; {remedy}") from error
    except errors.LocalEntryNotFoundError as error:
        raise _unreachable(repo, error) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
        raise CheckpointError(
            f"Hugging Face model {what!r} was not found (and {what!r} is no local path); check the name, "
            "or log in with `hf auth login` if it is private"
        ) from error
    except (errors.HfHubHTTPError, errors.OfflineModeIsEnabled, OSError) as error:
        raise _unreachable(repo, error) from error


def _unreachable(repo: str, error: Exception) -> CheckpointError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return CheckpointError(
        f"Hugging Face model {repo!r} could not be downloaded and is not in the local cache ({reason}); "
        "check the connection, or pass the path of a folder that holds the checkpoint"
    )


def _with_config(repo: str, folder: str) -> Path:
    if not (Path(folder) / "config.json").is_file():
        raise CheckpointError(
            f"Hugging Face model {repo!r} has no config.json; for a repository of GGUF files "
            f'name one: "{repo}:<file>.gguf"'
        )
    return Path(folder)


def _has_weights(folder: Path) -> bool:
    """Whether one of the checkpoint's files is there; if others are missing, opening says which."""
    return any(folder.glob("*.safetensors"))
