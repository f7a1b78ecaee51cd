"""The results of one batch, sent from the devices that compute them to all others.

    numbers  loss, weight, metrics, numbers in printed text: one all-reduce of a table, then means over all replicas
    rows     of a function that returns tensors with a row for each sample: joined over microbatches (`joined_rows`)

`BatchResults.announce` starts to exchange the results after a device's last compute action, and does not wait.
`collect` waits. On CUDA only `collect` makes the host wait. Every device fills in the numbers that it computes, and
their bits are summed as integers: the others are zero, so that the sum has the same bits.
"""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ...backends.contract import Handle
from ...core.capture.graph.outputs import RowOutputs
from ..batch.batch_agreement import BatchAgreement
from ..batch.losses import mean_loss
from ..batch.microbatches import Microbatch
from ..launch.team import Team
from ..optimizer.replica_exchange import Rows, gather_rows
from .joined_rows import JoinedRows
from .prepared import Prepared
from .result_parts import WEIGHT, Computed
from .step_data import StepRecord
from .workers import Workers


def weight_of(piece: Microbatch, replicas: int) -> float:
    """The weight of a microbatch if the step returns none.

    It is its share of the batch; with replicas, whose batches may have other sizes, its number of samples.
    """
    return piece.weight if replicas == 1 else float(piece.samples)


class BatchResults:
    """Loss, metrics, joined rows and printed text of one batch.

    Args:
        prepared: the step.
        pieces: its microbatches.
        microbatches: the largest number of microbatches of a replica.
        team: the devices.
        workers: the devices of this process.
        agreement: compares this batch between all ranks.
        everywhere: whether every process gets joined rows; otherwise only the processes that compute them.

    Attributes:
        joined: the rows of a function; None for a training step.

    Raises:
        RequestError: the results of two microbatches cannot be joined.
    """

    def __init__(
        self,
        prepared: Prepared,
        pieces: Sequence[Microbatch],
        microbatches: int,
        team: Team,
        workers: Workers,
        agreement: BatchAgreement,
        everywhere: bool = True,
    ) -> None:
        self._agreement = agreement
        self._prepared, self._most, self._team, self._workers = prepared, microbatches, team, workers
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
        self.joined: JoinedRows | None = None
        if isinstance(prepared.compiled[0].operators.step.outputs, RowOutputs):
            where = {device: queue.device for device, queue in workers.queues.items()}
            self.joined = JoinedRows(prepared, pieces, team, where, everywhere)
        self._tables: dict[int, Tensor] = {}
        self._handles: dict[int, list[Handle]] = {}
        self._own: dict[int, Rows] = {}
        self._rows: dict[int, Rows] = {}

    def announce(self, device: int, record: StepRecord) -> None:
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
        self._agreement.announce()

    def _table(self, device: int, record: StepRecord) -> Tensor:
        """The numbers that all devices compute, place by place; zeros for those of other devices."""
        where, parts = self._workers.queues[device].device, list[Tensor]()
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
            total = total + (computed[m].to(self._prepared.weight_dtype) if isinstance(part, Computed) else part)
        return total

    def collect(self, device: int) -> None:
        """Wait for the results of the other devices, and exchange the numbers between replicas; once a device."""
        if device in self._rows:
            return
        self._agreement.collect()
        self._wait_arrivals(device)
        own = [[0.0 if isinstance(part, Computed) else part for part in row] for row in self._parts]
        if self._computed:
            values = self._workers.queues[device].read(self._tables[device]).tolist()
            for (place, m, _), value in zip(self._computed, values, strict=True):
                own[m][place] = value
        self._own[device] = self._rows[device] = own
        replicas = self._team.replicas_of(device)
        if replicas is not None and self._prepared.columns:
            where = self._workers.queues[device].device
            columns, differ = self._prepared.columns, self._agreement.differ()
            of_each, apart = gather_rows(own, replicas, self._most, columns, where, differ)
            self._rows[device] = [row for rows in of_each for row in rows]
            self._agreement.note_replica(apart)
            if self._team.tensor is not None:
                self._team.tensor.check_equal(of_each)

    def _wait_arrivals(self, device: int) -> None:
        for handle in self._handles[device]:
            handle.wait()
        self._handles[device] = []  # a handle is waited for once

    @property
    def own(self) -> Rows:
        """For each microbatch of this replica loss, weight, metrics, and numbers in printed text."""
        return self._own[self._team.local[0]]

    def print_text(self) -> None:
        """Print and log what the step prints and logs, for each microbatch, in the process of the first device."""
        tensor = self._team.tensor
        if 0 in self._team.local and (tensor is None or self._team.replica % tensor.size == 0):
            for compiled, row in zip(self._prepared.compiled, self._own[0], strict=True):
                compiled.operators.step.outputs.printed.emit(row[self._prepared.columns :])

    def loss_is_finite(self, device: int) -> bool:
        """Whether the loss over all replicas is finite. The host waits for the device, and for the other devices."""
        self.collect(device)
        loss, _ = self.loss_and_metrics(device)
        return loss is None or bool(torch.isfinite(loss))

    def loss_and_metrics(self, device: int | None = None) -> tuple[Tensor | None, dict[str, float]]:
        """The means of loss and metrics over the microbatches of all replicas, in their own dtypes.

        Every device computes them from the same numbers. None and no metrics for a function that returns rows.

        Args:
            device: a device of this process that has collected them; by default the first one.
        """
        prepared, rows = self._prepared, self._rows[self._team.local[0] if device is None else device]
        if self.joined is not None:
            return None, {}
        total = math.fsum(row[WEIGHT] for row in rows)
        if self._team.replicas > 1 and not prepared.weighted:  # weights are samples here, not shares of a batch
            rows = [[row[0], row[WEIGHT] / total, *row[2:]] for row in rows]
            total = math.fsum(row[WEIGHT] for row in rows)
        losses = [torch.tensor(row[0], dtype=prepared.loss_dtype) for row in rows]
        dtype = prepared.weight_dtype
        weights = [row[WEIGHT] if dtype is None else torch.tensor(row[WEIGHT], dtype=dtype) for row in rows]
        metrics = {
            name: sum(row[2 + i] * row[WEIGHT] for row in rows) / total for i, name in enumerate(prepared.metrics)
        }
        return mean_loss(losses, weights, prepared.weighted)[0], metrics

    @property
    def rows(self) -> Any:
        """The return value of a function; None for a training step."""
        return None if self.joined is None else self.joined.result()


def _means(values: list[Tensor]) -> Tensor:
    """The mean of each tensor, as float64."""
    if all(value.ndim == 0 for value in values):
        return torch.stack(values).double()
    return torch.stack([value.double().mean() for value in values])
