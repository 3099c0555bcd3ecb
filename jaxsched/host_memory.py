"""Host allocator settings for running on a CPU."""

from __future__ import annotations

import ctypes
import sys

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
