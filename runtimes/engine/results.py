"""One batch: its programs, its comparison between ranks, and its results, which all devices get.

    microbatches ──▶ programs, compared between ranks ──▶ devices ──▶ results, sent to all ranks ──▶ their means
                     (prepared, batch_agreement)          (workers)

    numbers  loss, weight, metrics: one all-reduce of a table, then means over all replicas
    rows     of a function that returns tensors with a row for each sample: joined over microbatches (see below)

After a device's last compute action `Batch.start_exchange` sends its results, and `collect` makes what is issued
later wait for those of the other devices. Every device fills in the numbers that it computes, and their bits are summed
as integers: the others are zero, so that the sum has the same bits.

On CUDA the host waits in neither: `loss` is a tensor on the device, and the host reads numbers at their first use, so
that it can issue the next step while this one runs::

    host     step 1 │ step 2 │ … │ loss.item()
    device       ╰─ step 1 ────────╯╰─ step 2 ──

Rows are joined in the order of the microbatches::

    microbatch   0      1      2
    computed   ┌─────┬─────┬─────┐  one tensor for the batch, allocated before anything runs; each result
    or received│     │     │     │  is copied to its rows when it is computed or received
               └─────┴─────┴─────┘
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...backends.contract import Handle
from ...backends.kind import dtype_name
from ...core.capture.export.captured_step import CapturedStep
from ...core.capture.graph.outputs import RowOutputs
from ...core.errors import RequestError
from ...core.trace.trace import Trace
from ..batch.batch_agreement import BatchAgreement
from ..batch.losses import mean_loss
from ..devices.compute import ComputeQueue
from ..launch.team import Team
from ..metrics import LazyValue
from ..microbatches import Microbatch
from ..programs.compiled import Compiled
from ..update.replica_values import Rows, gathered, sum_rows
from .prepared import LOSS, WEIGHT, Computed, Part, Prepared, PreparedSteps
from .step_data import StepRecord


def weight_of(piece: Microbatch, replicas: int) -> float:
    """The weight of a microbatch if the step returns none.

    It is its share of the batch; with replicas, whose batches may have other sizes, its number of samples.
    """
    return piece.weight if replicas == 1 else float(piece.samples)


class Batch:
    """A batch that runs once, in training or forward only, and its results.

    Args:
        microbatches: the largest number of microbatches of a replica.
        everywhere: whether every process gets joined rows; otherwise only the processes that compute them.

    Attributes:
        prepared: programs and actions for these microbatches.
        agreement: compares this batch between all ranks.
        remark: a line for the user if a shape is new; otherwise None.
        queues: device of this process → its compute queue.
        joined: the rows of a function; None for a training step.
        records: after it has run: device of this process → what it did.
        trace: after it has run, the clock's trace; None for real devices.

    Raises:
        RequestError: the step cannot be captured, or the plan cannot run it, or another rank has another batch; or the
            results of two microbatches cannot be joined.
    """

    def __init__(
        self,
        steps: PreparedSteps,
        pieces: Sequence[Microbatch],
        microbatches: int,
        team: Team,
        queues: Mapping[int, ComputeQueue],
        everywhere: bool = True,
    ) -> None:
        self.pieces, self.forget = pieces, steps.forget
        self.prepared, self.agreement, self.remark = steps.of(pieces, partial(BatchAgreement, team, queues, pieces))
        if team.tensors.divided:  # collectives of tensors of different shapes would hang
            self.agreement.refuse_before_run()
        prepared = self.prepared
        self._most, self._team, self.queues = microbatches, team, queues
        self._parts = [
            [weight_of(piece, team.replicas) if part is None else part for part in row]
            for row, piece in zip(prepared.parts, pieces, strict=True)
        ]
        self._computed = [
            (place, m, part)
            for place in range(len(self._parts[0]))
            for m, row in enumerate(self._parts)
            if isinstance(part := row[place], Computed)
        ]
        self.records: Mapping[int, StepRecord] = {}
        self.trace: Trace | None = None
        self.joined: JoinedRows | None = None
        if isinstance(self.captured.outputs, RowOutputs):
            self.joined = JoinedRows(prepared, pieces, team, everywhere)
        self._tables: dict[int, Tensor] = {}
        self._handles: dict[int, list[Handle]] = {}
        self._numbers: dict[int, Tensor] = {}
        self._collected: set[int] = set()
        self._own = self._rows = LazyValue[Rows](list)
        self._losses: dict[int, Tensor] = {}

    def start_exchange(self, device: int, record: StepRecord) -> None:
        """Start to exchange the results of all devices; after a device's last compute action.

        A number is the mean over its microbatch.
        """
        backend = self._team.backend(device)
        handles = self._handles.setdefault(device, [])
        for source in range(backend.devices):
            rows = [] if self.joined is None else self.joined.sent_by(source)
            if rows:
                handles.append(backend.broadcast(rows, source))
        if self._computed:
            table = self._tables[device] = self._table(device, record)
            handles.append(backend.all_reduce(table.view(torch.int64)))
        self.agreement.start_exchange()

    def _table(self, device: int, record: StepRecord) -> Tensor:
        """The numbers that all devices compute, place by place; zeros for those of other devices."""
        where, parts = self.queues[device].device, list[Tensor]()
        for (_, source), group in groupby(self._computed, key=lambda entry: (entry[0], entry[2].device)):
            of_one = list(group)  # of one place and device: of the same dtype
            if source == device:
                parts.append(_means([record.results[part.name, m] for _, m, part in of_one]))
            else:
                parts.append(torch.zeros(len(of_one), dtype=torch.float64, device=where))
        return torch.cat(parts)

    def total_weight(self, device: int) -> Tensor | float:
        """The sum of the microbatches' weights, in the dtype of the computed ones.

        It is computed on the device, so that the host does not wait.
        """
        self._wait_arrivals(device)
        computed = {m: self._tables[device][at] for at, (place, m, _) in enumerate(self._computed) if place == WEIGHT}
        total: Tensor | float = 0.0
        for m, row in enumerate(self._parts):
            part = row[WEIGHT]
            total = total + (computed[m].to(self.prepared.weight_dtype) if isinstance(part, Computed) else part)
        return total

    def collect(self, device: int) -> None:
        """Make what is issued later wait for the results of the other devices, and sum the numbers over replicas.

        Further calls for the same device have no effect. On CUDA the host waits for nothing.
        """
        if device in self._collected:
            return
        self._collected.add(device)
        self.agreement.collect()
        self._wait_arrivals(device)
        if self.joined is not None:
            return
        start_read, first = self.queues[device].start_read, device == self._team.local[0]
        rows = self._numbers[device] = self._device_rows(device)
        if first:
            read_own = start_read(rows)
            self._own = self._rows = LazyValue[Rows](lambda: read_own().tolist())
        replicas = self._team.replicas_of(device)
        if replicas is None:
            return
        table = sum_rows(rows, replicas, self._most, self.agreement.differ())
        self._numbers[device] = table.flatten(0, 1)[:, 1:]
        if first:
            read = start_read(table)
            of_each = LazyValue(lambda: gathered(read()))
            self._rows = LazyValue(lambda: [row for rows in of_each()[0] for row in rows])
            self.agreement.note_replica(lambda: of_each()[1])
            self._team.tensors.check_equal(lambda: of_each()[0])

    def _device_rows(self, device: int) -> Tensor:
        """The numbers of this replica on the device: a row for each microbatch."""
        queue = self.queues[device]
        known = torch.tensor([[_known(part) for part in row] for row in self._parts], dtype=torch.float64)
        rows = queue.upload(known)
        if self._computed:
            places = torch.tensor([m * known.shape[1] + place for place, m, _ in self._computed])
            rows.view(-1).index_copy_(0, queue.upload(places), self._tables[device])
        return rows

    def _wait_arrivals(self, device: int) -> None:
        for handle in self._handles[device]:
            handle.wait()
        self._handles[device] = []  # a handle is waited for once

    @property
    def captured(self) -> CapturedStep:
        """The step, captured for the first microbatch."""
        return self.prepared.compiled[0].operators.step

    @property
    def own(self) -> Rows:
        """For each microbatch of this replica loss, weight and metrics; waits for them."""
        return self._own()

    def loss_is_finite(self, device: int) -> bool:
        """Whether the loss over all replicas is finite. The host waits for the device, and for the other devices."""
        self.collect(device)
        return bool(self.queues[device].read(torch.isfinite(self.loss_on(device))))

    @property
    def loss(self) -> Tensor:
        """The loss on the first device of this process, after the batch of a step has run."""
        return self.loss_on(self._team.local[0])

    def loss_on(self, device: int) -> Tensor:
        """The mean of the loss over the microbatches of all replicas, in its own dtype, on the device.

        Every device computes it from the same numbers.

        Args:
            device: a device of this process that has collected them.
        """
        if device not in self._losses:
            prepared, numbers = self.prepared, self._numbers[device]
            weights, computed = numbers[:, WEIGHT], prepared.weighted and prepared.weight_dtype is not None
            if computed:
                weights = weights.to(prepared.weight_dtype)
            elif not prepared.weighted and self._team.replicas > 1:  # they are samples, not shares of a batch
                weights = weights / weights.sum()
            losses = numbers[:, LOSS].to(prepared.loss_dtype).unbind()
            self._losses[device] = mean_loss(losses, weights.unbind(), prepared.weighted, not computed)[0]
        return self._losses[device]

    def metrics(self) -> LazyValue[dict[str, float]]:
        """The means of the metrics over the microbatches of all replicas; empty for a function that returns rows.

        They refer to no tensor of the batch.
        """
        if self.joined is not None or not self.prepared.metrics:
            return LazyValue(dict)
        return LazyValue(partial(_means_of_metrics, self._rows, self.prepared.metrics))

    def rows(self) -> Any:
        """The return value of a function that returns rows, after it has run."""
        assert self.joined is not None
        return self.joined.result()

    @property
    def elements(self) -> int:
        """Number of elements of the batch's tensors."""
        return sum(leaf.numel() for piece in self.pieces for leaf in piece.leaves if isinstance(leaf, Tensor))


def _known(part: Part) -> float:
    """A number that the host knows; 0 in the place of one that is computed."""
    return 0.0 if isinstance(part, Computed) else part


def _means_of_metrics(rows: LazyValue[Rows], names: Sequence[str]) -> dict[str, float]:
    """The mean of each metric, NaN if all weights are 0. Weights are samples or shares: the means are the same."""
    total = math.fsum(row[WEIGHT] for row in rows()) or math.nan
    return {name: sum(row[2 + i] * row[WEIGHT] for row in rows()) / total for i, name in enumerate(names)}


def _means(values: list[Tensor]) -> Tensor:
    """The mean of each tensor, as float64."""
    if all(value.ndim == 0 for value in values):
        return torch.stack(values).double()
    return torch.stack([value.double().mean() for value in values])


class JoinedRows:
    """The results of a function, in this process.

    Args:
        everywhere: whether every process gets the results; otherwise only those that compute them, and the others get
            None.

    Raises:
        RequestError: the results of two microbatches differ in dtype, or in shape beyond their rows.
    """

    def __init__(self, prepared: Prepared, pieces: Sequence[Microbatch], team: Team, everywhere: bool) -> None:
        outputs = [_outputs(each) for each in prepared.compiled]
        self._outputs, self._here, self._everywhere = outputs[0], team.local, everywhere
        self._devices = team.size
        ends = [0, *accumulate(piece.samples for piece in pieces)]
        self._places: dict[tuple[str, int], list[tuple[Tensor, int]]] = {}
        self._sources: dict[int, list[Tensor]] = {device: [] for device in range(self._devices)}
        self._whole: list[Tensor | None] = []
        placement = prepared.plan.placement
        for number, first in enumerate(outputs[0].values):
            self._whole.append(None)
            if first is None:
                continue
            names = [str(each.values[number]) for each in outputs]
            devices = [placement[c.stage_of(name)] for c, name in zip(prepared.compiled, names, strict=True)]
            if not everywhere and not set(devices) & set(team.local):
                continue
            like = [c.operators.values[name] for c, name in zip(prepared.compiled, names, strict=True)]
            dim = outputs[0].dims[number]
            _check_alike([tensor.movedim(dim, 0) for tensor in like], pieces)
            local = next((device for device in devices if device in team.local), team.local[0])
            rest = like[0].movedim(dim, 0).shape[1:]
            whole = torch.empty((ends[-1], *rest), dtype=like[0].dtype, device=team.where[local])
            self._whole[number] = whole
            for m, (name, device) in enumerate(zip(names, devices, strict=True)):
                rows = whole[ends[m] : ends[m + 1]]
                self._places.setdefault((name, m), []).append((rows, dim))
                self._sources[device].append(rows)

    def store(self, name: str, microbatch: int, value: Tensor) -> bool:
        """Copy a result to its rows. Returns true: nothing else needs it."""
        for rows, dim in self._places.get((name, microbatch), ()):
            rows.copy_(value.movedim(dim, 0))
        return True

    def sent_by(self, device: int) -> list[Tensor]:
        """The rows that a device computes and sends to all others; empty if no other process gets them."""
        return self._sources[device] if self._everywhere and len(self._here) < self._devices else []

    def result(self) -> Any:
        """The function's return value for the whole batch, with its nesting."""
        found = [
            whole.movedim(0, dim).contiguous() if whole is not None and dim else whole
            for whole, dim in zip(self._whole, self._outputs.dims, strict=True)
        ]
        return pytree.tree_unflatten(found, self._outputs.nesting)


def _outputs(compiled: Compiled) -> RowOutputs:
    outputs = compiled.operators.step.outputs
    assert isinstance(outputs, RowOutputs)
    return outputs


def _check_alike(like: Sequence[Tensor], pieces: Sequence[Microbatch]) -> None:
    """Check that the results of all microbatches have one dtype, and one shape beyond dimension 0, their rows."""
    for other, piece in zip(like, pieces, strict=True):
        if other.shape[1:] != like[0].shape[1:] or other.dtype != like[0].dtype:
            raise RequestError(
                f"the function returns {_text(like[0])} for {pieces[0].samples} samples and {_text(other)} for "
                f"{piece.samples}: results that are joined need one shape beyond their rows; pad them"
            )


def _text(tensor: Tensor) -> str:
    return f"{'×'.join(map(str, tensor.shape))} of {dtype_name(tensor.dtype)}"
