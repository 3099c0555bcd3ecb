"""Host memory: what the allocator keeps, what goes back to the system, and arrays that always do."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from typing import Any

import numpy as np

# Parameters of glibc's mallopt, from malloc.h.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -2, -3, -8
KEEP_BYTES = (
    1 << 30
)  # blocks up to this size are kept for the next program instead of going back to the system


def keep_freed_memory() -> bool:
    """Makes glibc keep freed blocks, up to 1 GiB, for the whole process. Returns whether it did.

    XLA allocates the temporaries of a program at each run and frees them after it. By default glibc returns blocks of
    that size to the system, so every run pays for fresh pages: measured on a virtual machine, half the time of a
    decode step. Does nothing where the C library is not glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = {
        M_MMAP_THRESHOLD: KEEP_BYTES,
        M_TRIM_THRESHOLD: KEEP_BYTES,
        M_TOP_PAD: 64 << 20,
        M_ARENA_MAX: 1,
    }
    return all([mallopt(name, value) == 1 for name, value in settings.items()])


def return_freed_memory() -> bool:
    """Gives the system what glibc keeps of freed blocks (``malloc_trim``). Returns whether anything was given.

    Does nothing where the C library is not glibc. Takes some milliseconds, and what is allocated next is paid for anew.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        return bool(ctypes.CDLL(None).malloc_trim(0))
    except (OSError, AttributeError):
        return False


OWN_PAGES_BYTES = 1 << 20  # arrays from this size on get pages of their own


def empty_pages(shape: tuple[int, ...], dtype: Any, *, least: int = OWN_PAGES_BYTES) -> np.ndarray:
    """An array like ``np.empty``; from ``least`` bytes on it has memory pages of its own.

    They go back to the system as soon as it is freed. They are zeroed, and
    aligned so that jax can take the array over on a CPU without a copy.
    """
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    if size < max(1, least):
        return np.empty(shape, dtype)
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # fewer page faults now, fewer address look-ups at every use
    return np.frombuffer(memory, np.uint8).view(dtype).reshape(shape)
