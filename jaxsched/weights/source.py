"""Where tensors come from, whatever the file format."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from ..models.quantized import KernelFormat


class TensorSource(Protocol):
    """Named tensors of one checkpoint, under their Hugging Face names. Opening one reads no tensor."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor, including those the decoder does not use."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor, read-only, possibly a view of the mapped file.

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
