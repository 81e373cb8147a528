"""The process's heap, which the C library keeps, and Python's collector of garbage."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
MOST = 2**31 - 1  # bytes: what mallopt's int can say


def keep_freed() -> bool:
    """Let this process keep the memory that it frees, for its next tensors; returns whether it will.

    By default glibc gives every large block back to the kernel, which fills it with zeros, page by page, when
    it is next asked for: a tenth of a step of training on a CPU. Another C library than glibc is left as it
    is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all([mallopt(M_MMAP_THRESHOLD, MOST), mallopt(M_TRIM_THRESHOLD, MOST)])


@contextmanager
def uncollected() -> Iterator[None]:
    """Look for no garbage meanwhile, nor later in what is there at the end: libraries that are imported stay,
    and to go through them again and again takes a fifth of the time."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if on:
            gc.enable()
