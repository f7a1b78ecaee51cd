"""Keeping the memory that a training step frees for the next one: what the caching allocator does on a GPU.

The C library gives freed memory at the end of its heap back to the kernel and takes large blocks from it one by one.
A training step frees and takes the same saved tensors once a microbatch; every page that came back from the kernel is
cleared and faulted in anew: 48,000 faults and a tenth of the step's time on one worker of the benchmark GPT.
"""

import ctypes
import sys

# From malloc.h; the largest threshold that glibc takes on 64 bit is half of an arena's heap.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tell the C library to keep what is freed, for the whole process; peaks stay what they are.

    Returns:
        Whether it could be told: glibc can, other C libraries do without.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _NEVER)) and bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD))
