"""The C library's heap, made to serve training as the caching allocator does on a GPU.

The C library gives freed memory at the end of its heap back to the kernel and takes large blocks from it one by one.
A training step frees and takes the same saved tensors once a microbatch; every page that came back from the kernel is
cleared and faulted in anew: 48,000 faults and a tenth of the step's time on one worker of the benchmark GPT.

What is kept has holes, though. A block for a tensor is aligned, which leaves scraps beside it; small objects settle
there, and the hole that the tensor leaves is too small for the next of the same size. Given back while the heap takes
its shape, in the first step, such holes stay empty: 97 to 108 MB instead of 103 to 138 on that worker (glibc 2.36).

A model that has no memory to waste is another matter: there, only small blocks are kept. Planning for 288 MB of
parameters in layers of 16 MB left up to 1,500 MB of such holes on each of three ranks, for stages of 200 MB.
"""

import ctypes
import sys

# From malloc.h; the largest threshold that glibc takes on 64 bit is half of an arena's heap.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
_NEVER = 2**31 - 1
SMALL = 1 << 20
"""Bytes of the largest blocks that are kept where memory is short: most parameters are larger."""


_LIBRARY = ctypes.CDLL(None) if sys.platform.startswith("linux") else None


def keep_freed_memory(largest: int = _LARGEST_MMAP_THRESHOLD) -> bool:
    """Tell the C library to keep what is freed, for the whole process; peaks stay what they are.

    Args:
        largest: bytes of the largest blocks that are kept; larger ones go back to the kernel one by one.

    Returns:
        Whether it could be told: glibc can, other C libraries do without.
    """
    mallopt = getattr(_LIBRARY, "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _NEVER)) and bool(mallopt(_M_MMAP_THRESHOLD, largest))


def give_back_freed_memory() -> None:
    """Give every free page back to the kernel, this once, where the C library knows how."""
    trim = getattr(_LIBRARY, "malloc_trim", None)
    if trim is not None:
        trim(0)
