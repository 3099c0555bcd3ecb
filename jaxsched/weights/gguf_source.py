"""GGUF files: llama.cpp's names and layout on disk, Hugging Face's names and layout out of ``read``."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from jaxsched.gguf_file import GGUFError, GGUFTensor, read_gguf_header
from jaxsched.host_memory import empty_pages

from ..models.quantized import KernelFormat
from .errors import CheckpointError
from .gguf_blocks import FORMATS, read_blocks
from .gguf_config import gguf_architecture, gguf_config
from .source import map_bytes

_PLAIN: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
QUANTIZED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
"""Block formats that ``read`` turns into float32."""

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SLICE = 1 << 18  # numbers dequantized together
_ROPE_FACTORS = "rope_freqs.weight"


def _hugging_face_name(name: str) -> str:
    """Name in a Hugging Face checkpoint; a tensor without a counterpart keeps its own."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match and match[2] in _BLOCK:
        return f"model.layers.{match[1]}.{_BLOCK[match[2]]}.{match[3]}"
    return _TOP.get(name, name)


class GGUFSource:
    """Tensors of one GGUF file, dequantized when read.

    ``config`` is the equivalent config.json. Where the converter permutes the rows of the query and key
    projections (it pairs neighbouring rows for the rotation, Hugging Face pairs halves) ``read`` undoes that.

    Raises CheckpointError for a file that is not GGUF, is truncated or corrupt, or holds an unsupported
    model, and ImportError when the optional library that dequantizes is not installed.
    """

    declared = False  # its weights may be of any type; only quantization="keep" keeps them as they are

    def __init__(self, path: Path):
        try:
            header = read_gguf_header(path)
        except GGUFError as error:
            raise CheckpointError(str(error)) from error
        self._library = _import_gguf()
        self.header = header
        self.config = gguf_architecture(header)
        self._tensors: dict[str, GGUFTensor] = {}
        self._kinds: dict[str, str] = {}
        for name, tensor in header.tensors.items():
            ours = _hugging_face_name(name)
            if ours in self._tensors:
                raise CheckpointError(f"{path}: two tensors stand for {ours!r}; the file is corrupt")
            self._tensors[ours], self._kinds[ours] = tensor, self._check(name, tensor)

    def complete_config(self) -> dict[str, Any]:
        """Fills ``config`` in; a second stage, so that an unsupported architecture is named first."""
        factors = None
        if _ROPE_FACTORS in self._tensors:
            factors = self.read(_ROPE_FACTORS).astype(np.float32)
            del self._tensors[_ROPE_FACTORS]  # it lives on in the config
        self.config = gguf_config(self.header, factors)
        return self.config

    def file_of(self, name: str) -> Path:
        return self.header.path

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def formats(self) -> dict[str, KernelFormat]:
        """Matrix name, without ".weight" -> format, of those that ``read_quantized`` can read."""
        return {
            name.removesuffix(".weight"): FORMATS[kind]
            for name, kind in self._kinds.items()
            if kind in FORMATS and name.endswith(".weight") and len(self._tensors[name].shape) == 2
        }

    def read_quantized(self, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Stored numbers ``[I, O]``, scale and offset ``[G, O]`` of a matrix of ``formats``, as it is in the file."""
        tensor, kind = self._tensors[name + ".weight"], self._kinds[name + ".weight"]
        rows = self._bytes(tensor).reshape(tensor.shape[0], -1)
        return read_blocks(kind, self._unpermuted(name + ".weight", rows))

    def read(self, name: str) -> np.ndarray:
        tensor, kind = self._tensors[name], self._kinds[name]
        data = self._bytes(tensor)
        if kind in _PLAIN:
            values = data.view(_PLAIN[kind]).reshape(tensor.shape)
        elif kind in QUANTIZED:
            values = self._dequantized(tensor, data)
        else:
            raise CheckpointError(
                f"{self.header.path}: tensor {name!r} has type {kind}; "
                f"supported: {', '.join((*_PLAIN, *QUANTIZED))}"
            )
        return self._unpermuted(name, values)

    def _dequantized(self, tensor: GGUFTensor, data: np.ndarray) -> np.ndarray:
        """float32 values of blocks. Some rows at a time: the library makes several arrays of what it is given."""
        kind = self._library.GGMLQuantizationType(tensor.kind)
        # Soon freed: what is not too large comes from memory that is used again and again.
        values = empty_pages((math.prod(tensor.shape[:-1]), tensor.shape[-1]), np.float32, least=32 << 20)
        rows, step = data.reshape(len(values), -1), max(1, _SLICE // tensor.shape[-1])
        for i in range(0, len(rows), step):
            values[i : i + step] = self._library.quants.dequantize(rows[i : i + step], kind)
        return values.reshape(tensor.shape)

    def _unpermuted(self, name: str, values: np.ndarray) -> np.ndarray:
        if self.header.metadata["general.architecture"] != "llama":
            return values
        if ".self_attn.q_proj." in name:
            heads = self.config["num_attention_heads"]
        elif ".self_attn.k_proj." in name:
            heads = self.config.get("num_key_value_heads") or self.config["num_attention_heads"]
        else:
            return values
        if values.shape[0] % (2 * heads):
            raise CheckpointError(
                f"{self.header.path}: tensor {name!r} has {values.shape[0]} rows, "
                f"not a multiple of 2 × {heads} heads; the file is corrupt"
            )
        pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
        return pairs.swapaxes(1, 2).reshape(values.shape)

    def _bytes(self, tensor: GGUFTensor) -> np.ndarray:
        return map_bytes(self.header.path, tensor.offset, self._nbytes(tensor))

    def _nbytes(self, tensor: GGUFTensor) -> int:
        block, size = self._library.GGML_QUANT_SIZES[self._library.GGMLQuantizationType(tensor.kind)]
        return math.prod(tensor.shape) // block * size

    def _check(self, name: str, tensor: GGUFTensor) -> str:
        """Name of the storage type, once the data is known to lie within the file."""
        where = f"{self.header.path}: tensor {name!r}"
        try:
            kind = self._library.GGMLQuantizationType(tensor.kind)
        except ValueError as error:
            raise CheckpointError(
                f"{where} has unknown type {tensor.kind}; supported: {', '.join((*_PLAIN, *QUANTIZED))}"
            ) from error
        block = self._library.GGML_QUANT_SIZES[kind][0]
        if not tensor.shape or tensor.shape[-1] % block:
            raise CheckpointError(
                f"{where} of shape {tensor.shape} is not made of {kind.name} blocks of {block}"
            )
        end = tensor.offset + self._nbytes(tensor)
        if end > self.header.size:
            raise CheckpointError(
                f"{self.header.path} is truncated: tensor {name!r} ends at byte {end}, "
                f"the file has {self.header.size}; download it again"
            )
        return kind.name


def _import_gguf() -> ModuleType:
    try:
        import gguf
    except ImportError as error:
        raise ImportError(
            "reading a GGUF file needs the package gguf; install it with: pip install gguf"
        ) from error
    return gguf
