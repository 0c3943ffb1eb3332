"""Freed memory that stays in the process, so that the next pack does not ask the system for it again."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache

# glibc's names for mallopt, and what is asked for. 32 MiB is the most that it takes: larger blocks still go back to the system.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_KEPT = 32 * 2**20


@cache
def keep_freed_memory() -> bool:
    """Let glibc keep what training on a CPU frees; False where that is not possible, or the user has set MALLOC_ variables.

    By default every activation above 128 KiB to 32 MiB (the limit grows by itself) comes from the system as zeroed pages and goes
    back when its graph is freed. A virtual machine pays several microseconds for each of these pages, some hundred thousand a step.
    """
    if not sys.platform.startswith("linux") or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)) and bool(mallopt(_TRIM_THRESHOLD, -1))
