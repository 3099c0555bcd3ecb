"""Writes jaxsched's own checkpoints: weights that are cast, fused and perhaps quantised once, not at every start."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxsched import __version__
from jaxsched.gguf_file import read_gguf_header, write_gguf_metadata
from jaxsched.info import binary, storage_type
from jaxsched.text.load import GGUF_TOKENIZER
from jaxsched.weights import (
    Checkpoint,
    CheckpointError,
    NativeTensors,
    load_params,
    open_checkpoint,
    planned_formats,
)
from jaxsched.weights.native import save
from jaxsched.weights.safetensors_source import SafetensorsSource

DTYPES = ("auto", "float32", "bfloat16", "float16")
_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.jinja",
              "chat_template.json", "tekken.json")  # fmt: skip


def convert_model(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    revision: str | None = None,
    dtype: str = "auto",
    quantization: str | None = None,
) -> str:
    """Writes the checkpoint ``model`` as a folder that ``LLM`` and ``load_model`` take. Returns what was written.

    ``dtype`` is that of the weights: "auto" is the one they are saved in, float32 for block-quantised GGUF.
    ``quantization`` is as in ``EngineConfig``. The folder appears when all is written.

    Raises FileExistsError if ``out`` is a file or a folder that is not empty, and otherwise as ``open_checkpoint`` and
    ``load_params``.
    """
    target, began = Path(out).expanduser().absolute(), time.monotonic()
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} exists already and is not empty; name another folder, or remove it")
    checkpoint = open_checkpoint(model, revision=revision)
    if isinstance(checkpoint.source, NativeTensors):
        raise CheckpointError(
            f"{checkpoint.path} is converted already; copy the folder, or convert the original model"
        )
    dtype = _saved_dtype(checkpoint) if dtype == "auto" else dtype
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        size = _write(partial, checkpoint, dtype, quantization, {"model": str(model), "revision": revision})
        if target.exists():
            target.rmdir()
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    kind = f"{quantization} in {dtype}" if quantization else dtype
    return f"{binary(size)} of {kind} weights in {time.monotonic() - began:.1f} s"


def _write(
    folder: Path, checkpoint: Checkpoint, dtype: str, quantization: str | None, source: dict[str, Any]
) -> int:
    """Writes all files; returns the bytes of the parameters."""
    for name, content in (
        ("config.json", checkpoint.config),
        ("generation_config.json", checkpoint.generation_config),
    ):
        if content:
            (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    _write_tokenizer(folder, checkpoint.path)
    device = jax.devices("cpu")[0]
    params = load_params(checkpoint, dtype=jnp.dtype(dtype), device=device, quantization=quantization)
    arrays = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    del params
    formats = planned_formats(
        checkpoint, quantization, fp8=True
    )  # what the device at hand can do does not matter
    method = (quantization or "as it was") if formats else None
    save(
        folder,
        arrays,
        formats,
        {"jaxsched": __version__, "source": source, "dtype": dtype, "quantization": method},
    )
    written = open_checkpoint(folder)
    if written.model_config != checkpoint.model_config or written.eos_token_ids != checkpoint.eos_token_ids:
        raise CheckpointError(
            f"the configuration of {checkpoint.path} cannot be written as JSON without a loss"
        )
    return sum(x.nbytes for x in arrays.values())


def _write_tokenizer(folder: Path, path: Path) -> None:
    if path.is_file():
        write_gguf_metadata(read_gguf_header(path), folder / GGUF_TOKENIZER)
        return
    for pattern in _TOKENIZER:
        for file in path.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)


def _saved_dtype(checkpoint: Checkpoint) -> str:
    """The dtype that loses nothing."""
    if checkpoint.path.is_file() and storage_type(checkpoint) not in ("F32", "F16", "BF16"):
        return "float32"
    if isinstance(checkpoint.source, SafetensorsSource):  # config.json may say something else
        stored = checkpoint.source.dtypes()
        return stored.pop() if len(stored) == 1 and stored <= set(DTYPES) else "float32"
    saved = checkpoint.model_config.dtype
    return saved if saved in DTYPES else "float32"
