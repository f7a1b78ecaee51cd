"""Graphs on a CPU with the semantics of CUDA graphs: a capture executes nothing, a replay repeats operators.

A capture records operators with the addresses of their operands, and computes shapes with fake tensors. Its memory is
an arena: what the capture frees is given to later captures, as by CUDA's allocator, and new memory is filled with NaN.
A replay runs the recorded operators on these addresses, and no Python of the program. So these mistakes give wrong
results, or an error:

1. a value that the host reads in a capture: an error; one that the program takes from a key is of no step;
2. memory outside of the pool that a step allocates anew: an error, since it was freed;
3. memory of the pool that is reused while something still reads it: that reads other numbers.
"""

import weakref
from contextlib import contextmanager
from typing import ClassVar

import numpy as np
import torch
from panpipe.core.capture.programs.programs import reads_on_host
from panpipe.runtimes.programs.graphs import graph_pool
from panpipe.runtimes.programs.graphs.graph_pool import extent_of, viewed_as
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
SIZE = 1 << 28
"""Bytes of an arena's addresses; the operating system gives memory to those that are used."""
ALIGNED = 64
_UNDECLARED_VIEWS = {aten._unsafe_view.default}


class FakeGraphPool:
    """Captures graphs in an arena.

    Attributes:
        arena: its memory.
        captures, replays: how many there were.
        peak: the end of the highest address that was used.
    """

    made: ClassVar[list["FakeGraphPool"]] = []

    def __init__(self, device):
        self._arena = np.empty(SIZE, np.uint8)
        self.arena = torch.from_numpy(self._arena)
        self._free = [(0, SIZE)]
        self.captures = self.replays = self.peak = 0
        FakeGraphPool.made.append(self)

    def capture(self, run, generators):
        self.captures += 1
        recorder = Recorder(self)
        with generators.active(), recorder:
            run()
        return FakeGraph(self, recorder.calls, generators)

    @contextmanager
    def allocating(self):
        with _Allocating(self):
            yield

    def alias(self, tensor):
        """With a storage like the tensor's, since operators such as ``as_strided_scatter`` take offsets in it."""
        at = self.offset(tensor)
        if at is None:
            return tensor
        storage = tensor.untyped_storage()
        start = storage.data_ptr() - self._arena.ctypes.data
        block = torch.from_numpy(self._arena[start : start + storage.nbytes()])
        return self._at(at - start, tensor, block)

    @property
    def bytes(self):
        return self.peak

    def offset(self, tensor):
        """Where a tensor is in the arena; None if it is outside."""
        at = tensor.data_ptr() - self._arena.ctypes.data
        return at if 0 <= at < SIZE and tensor.numel() else None

    def new(self, like):
        """A tensor in the arena."""
        if not like.numel():
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        size = extent_of(like)
        whole = -(-size // ALIGNED) * ALIGNED
        place = next(i for i, (start, stop) in enumerate(self._free) if stop - start >= whole)
        start, stop = self._free[place]
        self._free[place : place + 1] = [(start + whole, stop)] if stop - start > whole else []
        self.peak = max(self.peak, start + whole)
        memory = self._arena[start : start + size]
        memory.fill(255)
        weakref.finalize(memory, self._give_back, start, start + whole)
        return self._at(0, like, torch.from_numpy(memory))

    def _at(self, start, like, base):
        return viewed_as(like, base[start : start + extent_of(like)])

    def _give_back(self, start, stop):
        merged = []
        for one in sorted([*self._free, (start, stop)]):
            if merged and merged[-1][1] == one[0]:
                merged[-1] = merged[-1][0], one[1]
            else:
                merged.append(one)
        self._free = merged


class FakeGraph:
    def __init__(self, pool, calls, generators):
        self._pool, self._calls, self._generators = pool, calls, generators

    def replay(self):
        self._pool.replays += 1
        with torch.no_grad(), self._generators.active():
            for func, args, kwargs, made in self._calls:
                found = func(*pytree.tree_map(given, args), **pytree.tree_map(given, kwargs))
                if made is not None:
                    for target, value in zip(made, pytree.tree_leaves(found), strict=True):
                        if isinstance(target, Tensor):
                            target.copy_(value)


class Outside:
    """A tensor outside of the pool, which the graph does not keep."""

    def __init__(self, tensor):
        self._storage = weakref.ref(tensor.untyped_storage())
        self._dtype = tensor.dtype
        self._layout = tensor.storage_offset(), tensor.shape, tensor.stride()
        self._flags = tensor.is_conj(), tensor.is_neg()

    def tensor(self):
        storage = self._storage()
        if storage is None:
            raise RuntimeError("a graph uses memory that was freed")
        found = torch.empty(0, dtype=self._dtype).set_(storage, *self._layout)
        found = found.conj() if self._flags[0] else found
        return torch._neg_view(found) if self._flags[1] else found


def given(value):
    return value.tensor() if isinstance(value, Outside) else value


def is_view(func):
    returns = [one.alias_info for one in func._schema.returns]
    return func in _UNDECLARED_VIEWS or any(alias is not None and not alias.is_write for alias in returns)


class Recorder(TorchDispatchMode):
    """Records operators instead of running them.

    Attributes:
        calls: operator, arguments, and the memory of new results.
    """

    def __init__(self, pool):
        super().__init__()
        self._pool, self.calls = pool, []
        self._fake = FakeTensorMode()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "prim" or is_view(func) or torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default and is_constant(self._pool, args[0]):
            return func(*args)
        if reads_on_host(func, args, kwargs):
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        written = {
            argument.name: args[place] if place < len(args) else kwargs.get(argument.name)
            for place, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        }
        kept = pytree.tree_map(self._kept, args), pytree.tree_map(self._kept, kwargs)
        if written:
            self.calls.append((func, *kept, None))
            results = [written[one.name] if one.name else None for one in func._schema.arguments if one.name in written]
            returns = len(func._schema.returns)
            return None if returns == 0 else results[0] if returns == 1 else tuple(results)
        with self._fake:
            fake = func(*pytree.tree_map(self._faked, args), **pytree.tree_map(self._faked, kwargs))
        leaves, tree = pytree.tree_flatten(fake)
        made = [self._pool.new(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        aliases = [self._pool.alias(one) if isinstance(one, Tensor) else one for one in made]
        self.calls.append((func, *kept, aliases))
        return pytree.tree_unflatten(made, tree)

    def _kept(self, value):
        if not isinstance(value, Tensor):
            return value
        if not value.numel():  # it has no memory
            return self._pool.new(value)
        return self._pool.alias(value) if self._pool.offset(value) is not None else Outside(value)

    def _faked(self, value):
        if not isinstance(value, Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def is_constant(pool, tensor):
    """Whether a tensor is a number on the host that the program was generated with, such as the ordinal of a draw."""
    return tensor.dtype is torch.int64 and tensor.dim() == 0 and pool.offset(tensor) is None


class _Allocating(TorchDispatchMode):
    def __init__(self, pool):
        super().__init__()
        self._pool = pool

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and not is_view(func):
            return self._pool.new(found)
        return found


def install(monkeypatch):
    """Let pipelines on the CPU capture graphs. Returns the list of the pools that are created."""
    FakeGraphPool.made = []
    monkeypatch.setitem(graph_pool._KINDS, "cpu", FakeGraphPool)
    return FakeGraphPool.made
