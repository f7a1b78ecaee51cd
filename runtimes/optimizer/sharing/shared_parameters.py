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

import torch
from torch import Tensor, nn

from ....backends.contract import Backend, Handle
from ....core.errors import RequestError
from ...weights.allocation import allocate, deallocate
from ...weights.remote_tensors import make_remote
from .sharded_buckets import ShardedBucket, in_memory_order, numbers_of

HOLDERS = "the replicas, each of which has a part between steps"


class SharedParameters:
    """The parameters of one stage that replicas share, frozen ones too.

    Args:
        buckets: of the stage, with a part of the values each.

    Attributes:
        divided: whether this replica has its parts alone, or whole parameters during a run. Before, it has the whole
            parameters, and UNSHARD and RESHARD leave them as they are.
        lent: whether the model has whole parameters in memory of its own.
        buckets: as given.
        memory_of: parameter → all of its memory, in one dimension; empty until `own_memory`.
    """

    def __init__(self, buckets: Sequence[ShardedBucket]) -> None:
        self.divided = False
        self.buckets = list(buckets)
        self._names = {p: name for bucket in buckets for name, p in bucket.parameters.items()}
        self._classes = {parameter: type(parameter) for parameter in self._names}
        self._wholes: dict[ShardedBucket, Tensor] = {}
        self.lent, self._in_flight = False, False
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
                memory = _own_memory(parameter, bucket.elements if bucket.is_single else None)
                self.memory_of[parameter] = memory
                self._views[parameter] = parameter.data
                if bucket.is_single:
                    self._wholes[bucket] = memory

    def keep_parts(self) -> None:
        """Take this replica's part of the whole parameters, and free these."""
        with torch.no_grad():
            for bucket in self.buckets:
                assert bucket.values is not None
                bucket.values.copy_(self._whole_of(bucket)[bucket.own])
        self.divided = True
        self.free()

    def divide(self, before: ShardedBucket | None, after: Sequence[ShardedBucket], replicas: Backend) -> None:
        """Replace a bucket by others of the same parameters, after `keep_parts`. All replicas call this together.

        Args:
            before: one of ``buckets``; None for others of empty parameters, which were in none.
            after: the others.
            replicas: the device's transport to its replicas.
        """
        if before is not None:
            whole = _gathered(before, replicas)
            self.buckets.remove(before)
            for bucket in after:
                assert bucket.values is not None
                joined = torch.zeros(bucket.elements, dtype=bucket.dtype, device=bucket.device)
                for name, parameter in bucket.parameters.items():
                    at, old, size = bucket.offsets[name], before.offsets[name], parameter.numel()
                    joined[at : at + size].copy_(whole[old : old + size])
                bucket.values.copy_(joined[bucket.own])
        for bucket in after:
            self.buckets.append(bucket)
            if bucket.is_single:
                ((name, parameter),) = bucket.parameters.items()
                self._names[parameter] = name
                self._classes.setdefault(parameter, type(parameter))
                self._renew_memory(bucket, parameter)

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

    def _renew_memory(self, bucket: ShardedBucket, parameter: nn.Parameter) -> None:
        """Give the parameter of a bucket other memory, in which it can be gathered without a copy; it is freed now."""
        memory = torch.empty(bucket.elements, dtype=bucket.dtype, device=bucket.device)
        view = memory.as_strided(parameter.shape, parameter.stride())
        deallocate([memory])
        self._wholes[bucket] = self.memory_of[parameter] = memory
        self._views[parameter] = view
        if not self.lent:
            parameter.__class__ = self._classes[parameter]
            parameter.data = view
            make_remote(parameter, self._names[parameter], HOLDERS)

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
        if replicas is not None:
            for bucket in self.buckets:
                bucket.assign(_gathered(bucket, replicas))

    def take_back(self, *, keep: bool) -> None:
        """Take the parameters back that were lent.

        Args:
            keep: whether this replica's part of their values is kept.
        """
        with torch.no_grad():
            for bucket in self.buckets if keep else ():
                assert bucket.values is not None
                bucket.values.copy_(self._joined(bucket)[bucket.own])
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

    def gather(self, replicas: Backend) -> "ParametersGather":
        """Start to gather the whole parameters, unless the model has them; see `ParametersGather`."""
        if self.lent:
            return ParametersGather(self, [])
        self._in_flight = True
        if self.divided:
            self.hold()
        found: list[tuple[ShardedBucket, Tensor, Handle]] = []
        for bucket in self.buckets:
            assert bucket.values is not None
            whole = self._wholes.get(bucket) if self.divided else None
            if whole is None:
                whole = torch.empty(bucket.elements, dtype=bucket.dtype, device=bucket.device)
            whole[bucket.own].copy_(bucket.values)
            found.append((bucket, whole, replicas.all_gather(numbers_of(whole))))
        return ParametersGather(self, found)

    def gathered(self, bucket: ShardedBucket, whole: Tensor) -> None:
        """A bucket is whole.

        Its parameters are written through views that do not share their versions: autograd compares versions where a
        part of the step stays Python, and the values are those of its forward.
        """
        if not self.divided or bucket in self._wholes:
            return
        for name, parameter in bucket.parameters.items():
            at, view = bucket.offsets[name], self._views[parameter]
            in_memory_order(view).copy_(whole[at : at + view.numel()])

    def ended(self) -> None:
        """No all-gather writes any more."""
        self._in_flight = False

    def _whole_of(self, bucket: ShardedBucket) -> Tensor:
        """All parameters of a bucket in one tensor: of a single one its own memory."""
        return self._wholes[bucket] if bucket in self._wholes else self._joined(bucket)

    def _joined(self, bucket: ShardedBucket) -> Tensor:
        """All parameters of a bucket in a new tensor."""
        whole = torch.zeros(bucket.elements, dtype=bucket.dtype, device=bucket.device)
        for name, parameter in bucket.parameters.items():
            at = bucket.offsets[name]
            whole[at : at + parameter.numel()].copy_(in_memory_order(parameter))
        return whole


class ParametersGather:
    """The all-gather of a stage's parameters, in flight.

    Args:
        shared: the parameters.
        gathers: every bucket with the tensor that it is gathered in.
    """

    def __init__(self, shared: SharedParameters, gathers: list[tuple[ShardedBucket, Tensor, Handle]]) -> None:
        self._shared, self._gathers = shared, gathers
        self.bytes = sum(bucket.nbytes for bucket, _, _ in gathers)

    def wait(self) -> None:
        """Return when the model has the parameters."""
        with torch.no_grad():
            for bucket, whole, handle in self._gathers:
                handle.wait()
                self._shared.gathered(bucket, whole)
        self._gathers.clear()
        self._shared.ended()


def _gathered(bucket: ShardedBucket, replicas: Backend) -> Tensor:
    """The parameters of a bucket, whole, in a new tensor."""
    assert bucket.values is not None
    whole = torch.empty(bucket.elements, dtype=bucket.dtype, device=bucket.device)
    whole[bucket.own].copy_(bucket.values)
    replicas.all_gather(numbers_of(whole)).wait()
    return whole


def _own_memory(parameter: nn.Parameter, elements: int | None) -> Tensor:
    """Give a parameter memory of its own, as one dimension.

    Args:
        parameter: dense.
        elements: length of the memory, at least the parameter's; None for just as many.
    """
    count = parameter.numel()
    memory = torch.zeros(max(count, elements or 0), dtype=parameter.dtype, device=parameter.device)
    if parameter.untyped_storage().nbytes() > 0:
        with torch.no_grad():
            memory[:count].copy_(in_memory_order(parameter))
    parameter.data = memory.as_strided(parameter.shape, parameter.stride())
    return memory
