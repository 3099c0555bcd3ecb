"""GGUF's simple block formats as quantised kernels: nothing is dequantised, no number changes.

The formats (ggml's ``block_q8_0`` and so on): 32 numbers of a row with a float16 scale d, for the ``_1`` formats a
float16 minimum m, the fifth bits of all 32 in 4 bytes (Q5), and 16 bytes of low then high nibbles, or 32 bytes (Q8).
Value = (q - 8) d for Q4_0, (q - 16) d for Q5_0, q d + m for the ``_1`` formats, q d for Q8_0.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from ..models.quantized import KernelFormat
from .packing import columns_last

BLOCK = 32  # numbers
FORMATS = {
    "Q8_0": KernelFormat("int8", BLOCK),
    "Q4_0": KernelFormat("int4", BLOCK),
    "Q4_1": KernelFormat("int4", BLOCK, offset=True),
    "Q5_0": KernelFormat("int8", BLOCK),
    "Q5_1": KernelFormat("int8", BLOCK, offset=True),
}
"""Block formats that need not be dequantised, by GGUF's name."""
_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24}  # of a block


def read_blocks(kind: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Stored numbers ``[I, O]``, scale and offset ``[I/32, O]`` float32 of a tensor ``[O, I]``.

    ``rows`` uint8 ``[O, bytes]`` are its blocks; the result is of ``FORMATS[kind]``. Its values are to the last bit
    those that GGUF's library dequantises; of Q4_1, whose numbers are moved from 0..15 to -8..7, where m + 8 d is a
    float32: always, unless m and d differ a thousandfold, and then the last bit may differ.

    Raises ValueError for another kind and for rows that are not made of its blocks.
    """
    if kind not in FORMATS:
        raise ValueError(f"blocks of {kind} cannot be kept quantised; these can: {', '.join(FORMATS)}")
    if rows.ndim != 2 or rows.dtype != np.uint8 or rows.shape[1] % _BYTES[kind]:
        raise ValueError(f"{rows.dtype} {rows.shape} is not rows of {kind} blocks of {_BYTES[kind]} bytes")
    blocks = rows.reshape(rows.shape[0], -1, _BYTES[kind])
    scale, rest = _float16(blocks), blocks[..., 2:]
    minimum = None
    if FORMATS[kind].offset:
        minimum, rest = _float16(rest), rest[..., 2:]
    if kind == "Q8_0":
        return _matrix(columns_last(rest).view(np.int8)), scale, None
    if kind in ("Q4_0", "Q4_1"):
        stored = _matrix(_nibbles(rest).view(np.int8) - np.int8(8)).astype(ml_dtypes.int4)
        return stored, scale, None if minimum is None else minimum + 8 * scale
    fifth = np.unpackbits(columns_last(rest[..., :4]), axis=1, bitorder="little")
    numbers = (_nibbles(rest[..., 4:]) | fifth << 4).view(np.int8)
    if minimum is None:
        numbers -= np.int8(16)
    return _matrix(numbers), scale, minimum


def _float16(blocks: np.ndarray) -> np.ndarray:
    """``[G, O]`` float32 of the first two bytes of blocks ``[O, G, ...]``."""
    return np.ascontiguousarray(np.ascontiguousarray(blocks[..., :2]).view("<f2")[..., 0].T).astype(
        np.float32
    )


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """``[O, G, 16]`` -> ``[G, 32, O]`` of 0..15: the low halves, then the high halves."""
    packed = columns_last(packed)
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _matrix(numbers: np.ndarray) -> np.ndarray:
    return numbers.reshape(-1, numbers.shape[-1])
