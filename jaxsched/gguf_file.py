"""Reads the header of a GGUF file: metadata and the table of tensors. Loads no tensor, needs no library.

The format is llama.cpp's (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), versions 2 and 3,
little endian.
Both ``weights`` and ``text`` need it, hence its place beside them.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import struct
from pathlib import Path
from typing import Any

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMS = 4


_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Tokens that end a turn or a document, by their text: files of chat models seldom name all of theirs. A part of
# llama.cpp's list (llama-vocab.cpp), without those that are ends in some models only.
_END_TEXTS = {
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>",
    "<end_of_utterance>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
}  # fmt: skip
_NORMAL = 1  # value of tokenizer.ggml.token_type


class GGUFError(ValueError):
    """The file is not GGUF, is truncated, or uses a feature that is not supported. Names the file."""


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """One row of the table of tensors."""

    shape: tuple[int, ...]  # numpy order: the last axis is contiguous
    kind: int  # ggml's number of the storage type
    offset: int  # bytes from the start of the file


@dataclasses.dataclass(frozen=True)
class GGUFHeader:
    """Everything a GGUF file says before its tensors."""

    path: Path
    size: int  # bytes of the file
    metadata: dict[str, Any]  # scalars, str, or lists of them
    tensors: dict[str, GGUFTensor]


def read_gguf_header(path: str | os.PathLike[str]) -> GGUFHeader:
    """Parses the header.

    Raises GGUFError for what is not a GGUF file or ends too early, and OSError as ``open`` does.
    """
    path = Path(path)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if file.read(4) != b"GGUF":
            raise GGUFError(
                f"{path} is not a GGUF file: it does not start with the bytes 'GGUF'; check the download"
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Cursor(path, data, 4, size))


def end_tokens(metadata: dict[str, Any]) -> list[Any]:
    """The token ids after which a model has ended its turn: those that the metadata names, then those known by text."""
    named = (metadata.get(f"tokenizer.ggml.{key}") for key in _ENDS)
    found = dict.fromkeys(token for token in named if isinstance(token, int | float | str))
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(types, list):
        pairs = enumerate(zip(tokens, types, strict=False))
        found |= dict.fromkeys(i for i, (text, kind) in pairs if text in _END_TEXTS and kind != _NORMAL)
    return list(found)


class _Cursor:
    """A position in the file that refuses to run past its end."""

    def __init__(self, path: Path, data: mmap.mmap, position: int, size: int):
        self.path, self.data, self.position, self.size = path, data, position, size

    def take(self, count: int, what: str) -> int:
        """Moves ``count`` bytes ahead and returns where they start."""
        start, end = self.position, self.position + count
        if end > self.size:
            raise GGUFError(
                f"{self.path} is truncated: {what} needs bytes {start} to {end}, the file has {self.size}; "
                "download it again"
            )
        self.position = end
        return start

    def numbers(self, letter: str, count: int, what: str) -> tuple[Any, ...]:
        start = self.take(struct.calcsize("<" + letter) * count, what)
        return struct.unpack_from(f"<{count}{letter}", self.data, start)

    def text(self, what: str) -> str:
        (length,) = self.numbers("Q", 1, what)
        start = self.take(length, what)
        # A vocabulary may hold pieces of a character; they are replaced, not refused.
        return self.data[start : start + length].decode("utf-8", errors="replace")

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.text(f"metadata {key!r}")
        if kind in _SCALARS:
            return self.numbers(_SCALARS[kind], 1, f"metadata {key!r}")[0]
        if kind != _ARRAY:
            raise GGUFError(f"{self.path}: metadata {key!r} has unknown type {kind}; the file is corrupt")
        (item,), (count,) = (
            self.numbers("I", 1, f"metadata {key!r}"),
            self.numbers("Q", 1, f"metadata {key!r}"),
        )
        if item == _STRING:
            return [self.text(f"metadata {key!r}") for _ in range(count)]
        if item in _SCALARS:
            return list(self.numbers(_SCALARS[item], count, f"metadata {key!r}"))
        raise GGUFError(f"{self.path}: metadata {key!r} is an array of type {item}, which is not supported")


def _parse(cursor: _Cursor) -> GGUFHeader:
    (version,) = cursor.numbers("I", 1, "the version")
    if version not in _VERSIONS:
        big = " (or big endian)" if version & 0xFFFF == 0 else ""
        raise GGUFError(f"{cursor.path} has GGUF version {version}{big}; supported: 2 and 3, little endian")
    tensor_count, field_count = cursor.numbers("Q", 2, "the header")
    metadata: dict[str, Any] = {}
    for _ in range(field_count):
        key = cursor.text("a metadata key")
        (kind,) = cursor.numbers("I", 1, f"metadata {key!r}")
        metadata[key] = cursor.value(kind, key)
    rows: dict[str, GGUFTensor] = {}
    for _ in range(tensor_count):
        name = cursor.text("a tensor name")
        what = f"the description of tensor {name!r}"
        (dims,) = cursor.numbers("I", 1, what)
        if dims > _MAX_DIMS or name in rows:
            fault = f"has {dims} axes, more than {_MAX_DIMS}" if dims > _MAX_DIMS else "is listed twice"
            raise GGUFError(f"{cursor.path}: tensor {name!r} {fault}; the file is corrupt")
        shape = cursor.numbers("Q", dims, what)[::-1]
        (kind,), (offset,) = cursor.numbers("I", 1, what), cursor.numbers("Q", 1, what)
        rows[name] = GGUFTensor(shape, kind, offset)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise GGUFError(
            f"{cursor.path}: general.alignment is {alignment!r}, not a positive integer; the file is corrupt"
        )
    start = -(-cursor.position // alignment) * alignment
    tensors = {name: dataclasses.replace(row, offset=row.offset + start) for name, row in rows.items()}
    return GGUFHeader(cursor.path, cursor.size, metadata, tensors)
