"""Where tensors come from, whatever the file format."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from ..models.quantized import KernelFormat
from .errors import CheckpointError


class TensorSource(Protocol):
    """Named tensors of one checkpoint, under their Hugging Face names. Opening one reads no tensor."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor, including those the decoder does not use."""
        ...

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor, for messages."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor, not to be written to, possibly a view of a mapped file. May be called in several threads at once.

        The dtype is the stored one (bfloat16 is ``ml_dtypes.bfloat16``); block-quantized tensors come as
        float32. Raises CheckpointError for an unsupported storage type, KeyError for an unknown name.
        """
        ...


@runtime_checkable
class QuantizedSource(TensorSource, Protocol):
    """A source some of whose kernels are quantised. ``read`` of their weights gives dequantised values."""

    @property
    def declared(self) -> bool:
        """Whether the checkpoint is one for quantised inference, so that its kernels stay as they are."""
        ...

    def formats(self) -> dict[str, KernelFormat]:
        """Name of each linear layer whose kernel can be kept ("model.layers.0.self_attn.q_proj") -> its format."""
        ...

    def read_quantized(self, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Stored numbers ``[I, O]``, scale and offset (or None) ``[G, O]`` float32 of one of ``formats``."""
        ...


def map_bytes(path: Path, offset: int, count: int) -> np.ndarray:
    """``count`` bytes of a file, uint8, mapped into memory. They leave the process's memory with the last view of them.

    Raises CheckpointError if the file has become shorter, OSError as opening does.
    """
    try:
        data = np.memmap(path, np.uint8, "r", offset, (count,))
    except ValueError as error:
        raise CheckpointError(
            f"{path} ends before byte {offset + count}, where a tensor should end; download it again"
        ) from error
    if hasattr(mmap, "MADV_WILLNEED"):
        data._mmap.madvise(mmap.MADV_WILLNEED)  # type: ignore[attr-defined] # read ahead all of it, not page by page
    return np.asarray(data)
