"""Finds the tokenizer of a checkpoint."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from .gguf_tokenizer import gguf_tokenizer
from .hf_tokenizer import hf_tokenizer
from .tokenizer import Tokenizer

GGUF_TOKENIZER = "tokenizer.gguf"  # beside converted weights: a GGUF file without tensors


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer | None:
    """The tokenizer of the checkpoint at ``path``: a folder with tokenizer.json or tokenizer.gguf, or a
    .gguf file.

    None when the checkpoint has none; the model can then be given token ids only. A folder that only has the files of
    other tokenizer formats counts as having none, with a warning.

    Raises TokenizerError for files that are damaged, inconsistent, or of an unsupported kind.
    """
    path = Path(path)
    if path.is_file():
        return gguf_tokenizer(path)
    if (path / "tokenizer.json").is_file():
        return hf_tokenizer(path)
    if (path / GGUF_TOKENIZER).is_file():
        return gguf_tokenizer(path / GGUF_TOKENIZER)
    other = [name for name in ("tokenizer.model", "vocab.json", "tekken.json") if (path / name).is_file()]
    if other:
        warnings.warn(
            f"{path} has {other[0]} but no tokenizer.json, so only token ids are accepted; convert it, e.g. with "
            "transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...)",
            stacklevel=2,
        )
    return None
