"""Bits and layouts of quantised kernels on disk."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def columns_last(array: np.ndarray) -> np.ndarray:
    """``[O, ...]`` -> ``[..., O]``, a few rows at a time: transposing bytes at once runs against the caches."""
    result = np.empty((*array.shape[1:], array.shape[0]), array.dtype)
    for start in range(0, array.shape[0], 16):
        result[..., start : start + 16] = np.moveaxis(array[start : start + 16], 0, -1)
    return result


def unpack_words(words: np.ndarray, bits: int, axis: int, order: Sequence[int] | None = None) -> np.ndarray:
    """Unsigned numbers of ``bits`` bits (4 or 8) out of 32-bit words ``[m, n]``, as uint8.

    Along ``axis`` each word becomes 32 / bits numbers, the lowest bits first; ``order[i]`` is the place of the i-th.
    """
    count, mask = 32 // bits, np.uint32(2**bits - 1)
    words = np.ascontiguousarray(words).view(np.uint32)
    rows, columns = words.shape
    numbers = np.empty((rows, count, columns) if axis == 0 else (rows, columns, count), np.uint8)
    for i, place in enumerate(order or range(count)):
        part = (words >> np.uint32(bits * i)) & mask
        numbers[(slice(None), place) if axis == 0 else (..., place)] = part
    return numbers.reshape((rows * count, columns) if axis == 0 else (rows, columns * count))
