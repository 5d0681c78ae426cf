"""What the C library does with main memory that tensors no longer need.

glibc gives it back to the system, and the next update gets it again page by page: each is set to zero first. On a CPU
that took a tenth of an update's time (SmolLM2-135M, packs of 2,000 tokens). See mallopt(3).
"""

import ctypes
import os
from contextlib import suppress

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Names of the two settings in malloc.h."""

LARGEST_KEPT = 32 * 2**20
"""Bytes; larger blocks go back at once. It is the largest value that every version of glibc takes."""


def keep_freed() -> bool:
    """Lets the process keep freed memory for its next tensors; whether that was possible.

    Does nothing without glibc, and where the environment has `MALLOC_...` or `GLIBC_TUNABLES`: these go before.
    """
    if any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ):
        return False
    with suppress(AttributeError, OSError, TypeError):
        libc = ctypes.CDLL(None)
        return bool(libc.mallopt(MMAP_THRESHOLD, LARGEST_KEPT) and libc.mallopt(TRIM_THRESHOLD, -1))  # -1 is no limit
    return False


def give_back() -> None:
    """Gives the memory that is kept back to the system, where there is glibc."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
