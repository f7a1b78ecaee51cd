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
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from attrs import define
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import UninitializedParameter
from torch.utils.weak import WeakIdKeyDictionary

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


@contextmanager
def empty_weights() -> Iterator[None]:
    """Construct modules whose parameters take no memory.

    Each parameter moves to the meta device when it is registered, so that at most one has memory at a time. Buffers
    keep the values that the constructor computes, such as rotary tables and masks, which no checkpoint has. Pass the
    model to `panpipe.pipeline`, whose ``weights=`` is the source of its values.

    It applies to modules that this thread constructs; a tied weight stays one parameter.

    Example:
        >>> with panpipe.empty_weights():  # doctest: +SKIP
        ...     model = LlamaForCausalLM(config)
    """
    keep_freed_memory(SMALL)  # otherwise the C library keeps the memory of every freed parameter
    here = threading.get_ident()
    # A parameter with two names is registered twice; weak keys, because this table must not keep it alive.
    known: Any = WeakIdKeyDictionary()

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or isinstance(parameter, UninitializedParameter):
            return None  # unchanged
        if threading.get_ident() != here:
            return None
        if parameter not in known:
            known[parameter] = _on_meta(parameter)
        found: nn.Parameter = known[parameter]
        return found

    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]  # annotated too narrowly
    try:
        yield
    finally:
        handle.remove()


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    meta = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    meta.__dict__.update(parameter.__dict__)  # attributes that libraries set on parameters
    return meta
