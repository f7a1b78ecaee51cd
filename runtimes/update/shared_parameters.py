"""The parameters of a stage of which each replica holds a part (ZeRO-3), and the whole ones while the stage computes.

::

    own_memory      whole parameters, in memory of their own      then values from a checkpoint or the model are loaded
    keep_parts      part of each bucket │ whole: no memory        between steps; the model's tensors refuse uses
    UNSHARD         part ──all-gather──▶ whole parameters         before a run of the stage's actions
    RESHARD         part                │ whole: no memory        after it
    STEP            the optimizer steps the part

A large parameter is a bucket alone: its all-gather writes to the memory of the parameter itself. Small parameters are
gathered together, and copied. Memory is freed by resizing the storages, so that saved tensors may be views of
parameters: they are valid again after the next UNSHARD, as in FullyShardedDataParallel.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from ...backends.contract import Backend
from ...core.errors import RequestError
from ..weights.places import allocate, deallocate
from ..weights.remote_tensors import make_remote
from .buckets import Bucket, Transfers, in_memory_order

HOLDERS = "the replicas, each of which has a part between steps"


class SharedParameters:
    """The parameters of one stage that replicas share, frozen ones too.

    Attributes:
        divided: whether this replica has its parts alone, or whole parameters during a run. Before, it has the whole
            parameters, and UNSHARD and RESHARD leave them as they are.
        lent: whether the model has whole parameters in memory of its own.
        memory_of: parameter → all of its memory, in one dimension; empty until `own_memory`.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.divided = self.lent = self._in_flight = False
        self.buckets = list(buckets)
        self._names = {p: name for bucket in buckets for name, p in bucket.parameters.items()}
        self._classes = {parameter: type(parameter) for parameter in self._names}
        self.memory_of: dict[nn.Parameter, Tensor] = {}
        self._views: dict[nn.Parameter, Tensor] = {}

    @property
    def bytes(self) -> int:
        """Bytes of whole parameters."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def without_memory(self) -> bool:
        """Whether the whole parameters have memory during runs alone."""
        return self.divided and not self.lent

    def own_memory(self) -> None:
        """Give each parameter memory that no other tensor shares, before values are loaded; its values stay."""
        for bucket in self.buckets if not self.memory_of else ():
            for parameter in bucket.parameters.values():
                count = parameter.numel()
                memory = bucket.empty(bucket.elements if len(bucket.parameters) == 1 else count).zero_()
                if parameter.untyped_storage().nbytes() > 0:
                    memory[:count].copy_(in_memory_order(parameter))
                parameter.data = memory.as_strided(parameter.shape, parameter.stride())
                self.memory_of[parameter], self._views[parameter] = memory, parameter.data

    def _memory_of_all(self, bucket: Bucket) -> Tensor | None:
        """The memory of the parameter that is a bucket alone; None for others, which are copied."""
        first, *others = (self.memory_of[parameter] for parameter in bucket.parameters.values())
        return first if not others and len(first) == bucket.elements else None

    def keep_parts(self) -> None:
        """Take this replica's part of the whole parameters, and free these."""
        for bucket in self.buckets:
            whole = self._memory_of_all(bucket)
            _set_own(bucket, _joined(bucket) if whole is None else whole)
        self.divided = True
        self.free()

    def move(self, name: str, bucket: Bucket, replicas: Backend) -> None:
        """Move a frozen parameter to a bucket of its own, after `keep_parts`. All replicas call this together.

        The space that it had stays in its earlier bucket, unless it was alone there.
        """
        before = next((each for each in self.buckets if name in each.parameters), None)
        if before is None:
            return  # an empty one
        parameter, whole = bucket.parameters[name], bucket.empty().zero_()
        bucket.elements_of(parameter, whole).copy_(before.elements_of(parameter, before.gathered(replicas)))
        _set_own(bucket, whole)
        self.buckets.append(bucket)
        before.parameters = {n: p for n, p in before.parameters.items() if n != name}
        if not before.parameters:
            self.buckets.remove(before)

    def free(self) -> None:
        """Free the whole parameters, if this replica has its parts, and if no all-gather still writes to them.

        Those that the model has in memory of its own stay."""
        if not self.without_memory or self._in_flight:
            return
        lent = next((p for p, memory in self.memory_of.items() if not memory.untyped_storage().resizable()), None)
        if lent is not None:
            raise RequestError(
                f"the memory of parameter '{self._names[lent]}' is used outside of PyTorch, as by .numpy(), and with "
                "shard='parameters' it is freed after each run of a stage: copy it, or give Memory(shard='gradients')"
            )
        for parameter, name in self._names.items():
            make_remote(parameter, name, HOLDERS)
        deallocate(self.memory_of.values())

    def lend(self, replicas: Backend | None) -> None:
        """Give the model whole parameters in memory of its own, which nobody frees: the caller may keep references.

        Args:
            replicas: the device's transport to its replicas; None for undefined values.
        """
        self.lent = True
        for parameter, kind in self._classes.items():
            parameter.__class__ = kind
            parameter.data = torch.empty_strided(
                parameter.shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device
            )
        for bucket in self.buckets if replicas is not None else ():
            bucket.assign(bucket.gathered(replicas))  # type: ignore[arg-type]

    def take_back(self, *, keep: bool) -> None:
        """Take the parameters back that were lent.

        Args:
            keep: whether this replica's part of their values is kept.
        """
        for bucket in self.buckets if keep else ():
            _set_own(bucket, _joined(bucket))
        self.lent = False
        for parameter, view in self._views.items():
            parameter.data = view
            make_remote(parameter, self._names[parameter], HOLDERS)

    def hold(self) -> None:
        """Allocate whole parameters with undefined values."""
        for parameter, kind in self._classes.items():
            parameter.__class__ = kind
        allocate(self.memory_of.values())

    @contextmanager
    def stand_ins(self) -> Iterator[None]:
        """A context in which the whole parameters are zeros, to run programs whose results are not used."""
        self.hold()
        for memory in self.memory_of.values():
            memory.zero_()
        try:
            yield
        finally:
            self.free()

    def gather(self, replicas: Backend) -> Transfers:
        """Start to gather the whole parameters, unless the model has them.

        They are written to their memory, which does not share its version with them: autograd compares versions where a
        part of the step stays Python, and the values are those of its forward.
        """
        if self.lent:
            return Transfers([])
        self._in_flight = bool(self.buckets)
        if self.divided:
            self.hold()

        def start(bucket: Bucket) -> Transfers:
            own = self._memory_of_all(bucket) if self.divided else None
            whole = bucket.empty() if own is None else own

            def copy() -> None:
                for parameter in bucket.parameters.values() if self.divided and own is None else ():
                    self.memory_of[parameter].copy_(bucket.elements_of(parameter, whole))

            return Transfers([partial(bucket.gather, replicas, whole)], end=copy)

        def end() -> None:
            self._in_flight = False

        return Transfers([partial(start, bucket) for bucket in self.buckets], self.bytes, end)


def _set_own(bucket: Bucket, whole: Tensor) -> None:
    """Take this replica's part of the parameters of a bucket."""
    assert bucket.values is not None
    with torch.no_grad():
        bucket.values.copy_(whole[bucket.own])


def _joined(bucket: Bucket) -> Tensor:
    """All parameters of a bucket in a new tensor."""
    whole = bucket.empty().zero_()
    for parameter in bucket.parameters.values():
        bucket.elements_of(parameter, whole).copy_(in_memory_order(parameter))
    return whole
