"""Configures the C library's heap to keep freed memory, as torch's caching allocator does on a GPU.

By default the C library returns freed memory at the end of its heap to the kernel, and requests each large block from
it separately. A training step frees and allocates the same saved tensors for each microbatch; every page from the
kernel is cleared and causes a page fault: 48,000 faults and a tenth of the step's time on one worker of the benchmark
GPT.

Kept memory becomes fragmented. A tensor's block is aligned, which leaves small gaps; small objects are allocated there,
and the hole of the freed tensor is then too small for the next one of the same size. If free pages are returned once,
in the first step, these holes use no memory: 97 to 108 MB instead of 103 to 138 on that worker (glibc 2.36). They are
returned whenever more memory is in use than before: what is free at any other time is soon used again.

If memory is short, only small blocks are kept. Planning for 288 MB of parameters in layers of 16 MB otherwise left up
to 1,500 MB of holes on each of three ranks, for stages of 200 MB.
"""

import ctypes
import sys

from attrs import define

# From malloc.h; the largest threshold that glibc accepts on 64 bit is half of an arena's heap.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
_NEVER = 2**31 - 1
SMALL = 1 << 20
"""Bytes of the largest blocks that are kept if memory is short: most parameters are larger."""


_LIBRARY = ctypes.CDLL(None) if sys.platform.startswith("linux") else None


def keep_freed_memory(largest: int = _LARGEST_MMAP_THRESHOLD) -> bool:
    """Make the C library keep freed memory, for the whole process; the peak does not change.

    Args:
        largest: bytes of the largest blocks that are kept; larger ones are returned to the kernel.

    Returns:
        Whether the C library supports it: glibc does, others do not.
    """
    mallopt = getattr(_LIBRARY, "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _NEVER)) and bool(mallopt(_M_MMAP_THRESHOLD, largest))


def give_back_freed_memory() -> None:
    """Return every free page to the kernel once, if the C library supports it."""
    trim = getattr(_LIBRARY, "malloc_trim", None)
    if trim is not None:
        trim(0)


class _Usage(ctypes.Structure):
    """``struct mallinfo2`` of malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
        )
    ]  # fmt: skip


def bytes_in_use() -> int | None:
    """Bytes that the process has allocated and not freed; None if the C library does not count them (glibc 2.33)."""
    usage = getattr(_LIBRARY, "mallinfo2", None)
    if usage is None:
        return None
    usage.restype = _Usage
    found = usage()
    return int(found.uordblks + found.hblkhd)


@define
class GrowingHeap:
    """Returns free pages to the kernel while the memory in use grows.

    Attributes:
        most: the largest number of bytes in use when pages were returned.
    """

    most: int = 0

    def give_back(self) -> None:
        """Return every free page if more memory is in use than at any call before, or if that is unknown."""
        used = bytes_in_use()
        if used is not None and used <= self.most:
            return
        self.most = used or 0
        give_back_freed_memory()
