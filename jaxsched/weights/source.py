"""Where tensors come from, whatever the file format."""

from __future__ import annotations

from typing import Protocol

import numpy as np


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
