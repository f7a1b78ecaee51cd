"""What a step returned for a batch: a row of numbers from each microbatch, carried everywhere, and their means."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..batch.batch_agreement import BatchAgreement
from ..batch.losses import mean_loss
from ..batch.microbatches import Microbatch
from ..launch.team import Team
from ..optimizer.replicas import Rows, rows_of_all
from .executor import StepRecord
from .prepared import Prepared
from .results import SharedResults
from .workers import Workers


def weight_of(piece: Microbatch, replicas: int) -> float:
    """How much a microbatch counts, where the step does not say: its share of a batch, or over replicas, which may have
    batches of other sizes, its samples."""
    return piece.weight if replicas == 1 else float(piece.samples)


class BatchResults:
    """Loss, metrics and what is printed, of one batch.

    Args:
        prepared: what runs.
        pieces: its microbatches.
        microbatches: the most that a replica may have.
        team: the devices.
        workers: those of this process.
        agreement: of all ranks about this batch.
    """

    def __init__(
        self, prepared: Prepared, pieces: Sequence[Microbatch], microbatches: int, team: Team, workers: Workers,
        agreement: BatchAgreement,
    ) -> None:  # fmt: skip
        self._agreement = agreement
        self._prepared, self._most, self._team, self._workers = prepared, microbatches, team, workers
        self._parts = [
            [weight_of(piece, team.replicas) if part is None else part for part in row]
            for row, piece in zip(prepared.parts, pieces, strict=True)
        ]
        self._shared: dict[int, SharedResults] = {}
        self._own: dict[int, Rows] = {}
        self._rows: dict[int, Rows] = {}

    def announce(self, device: int, record: StepRecord) -> SharedResults:
        """Send what a device computed to all others, and ask for theirs; behind its last compute action."""
        backend = self._team.backend(device)
        shared = self._shared[device] = SharedResults(self._parts, backend, self._workers.queues[device])
        shared.announce(record)
        self._agreement.announce()
        return shared

    def collect(self, device: int) -> None:
        """Wait for the others' parts, and for those of all replicas."""
        self._agreement.collect()
        own = self._own[device] = self._rows[device] = self._shared[device].collect()
        replicas = self._team.replicas_of(device)
        if replicas is not None and self._prepared.columns:
            where = self._workers.queues[device].device
            columns, differ = self._prepared.columns, self._agreement.differ()
            self._rows[device], apart = rows_of_all(own, replicas, self._most, columns, where, differ)
            self._agreement.note_replica(apart)

    @property
    def own(self) -> Rows:
        """For each microbatch of this replica loss, weight, metrics, and what the step writes into text."""
        return self._own[self._team.local[0]]

    def say(self) -> None:
        """Print and log what the step prints and logs, microbatch by microbatch, in the process that does."""
        if 0 in self._team.local:
            for compiled, row in zip(self._prepared.compiled, self._own[0], strict=True):
                compiled.operators.step.outputs.printed.say(row[self._prepared.columns :])

    def loss_and_metrics(self) -> tuple[Tensor, dict[str, float]]:
        """Their means over the microbatches of all replicas: by numbers that every device has, in the dtypes that they
        had."""
        prepared, rows = self._prepared, self._rows[self._team.local[0]]
        total = math.fsum(row[1] for row in rows)
        if self._team.replicas > 1 and not prepared.weighted:  # samples, and not shares of a batch
            rows = [[row[0], row[1] / total, *row[2:]] for row in rows]
            total = math.fsum(row[1] for row in rows)
        losses = [torch.tensor(row[0], dtype=prepared.loss_dtype) for row in rows]
        dtype = prepared.weight_dtype
        weights = [row[1] if dtype is None else torch.tensor(row[1], dtype=dtype) for row in rows]
        metrics = {name: sum(row[2 + i] * row[1] for row in rows) / total for i, name in enumerate(prepared.metrics)}
        return mean_loss(losses, weights, prepared.weighted)[0], metrics
