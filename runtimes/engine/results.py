"""The parts of a step's result, carried from the devices that compute them to all of them."""

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from ...backends.contract import Backend, Handle
from ..devices.compute import ComputeQueue
from .executor import StepRecord


@frozen
class Computed:
    """A part of the step's result for one microbatch.

    Args:
        name: its node in the captured graph.
        device: the device that computes it.
    """

    name: str
    device: int


Part = Computed | float

_WEIGHT = 1
"""Where a microbatch's weight stands among its parts."""


class SharedResults:
    """Loss, weight and metrics of one step at one device.

    On CUDA waiting is for streams; `collect` alone makes the host wait, at the end of a step.

    `announce` sends what this device computed, posts receives for the rest, and does not wait: the last stage has its
    results while the first ones are still at work. `collect` waits.

    Args:
        parts: for each microbatch, as many parts of the step's result: computed somewhere, or a number.
        backend: this device's end of the transport.
        queue: where the device computes.
    """

    def __init__(self, parts: Sequence[Sequence[Part]], backend: Backend, queue: ComputeQueue) -> None:
        self._parts, self._backend, self._queue = parts, backend, queue
        own: dict[int, list[tuple[int, list[int]]]] = {}
        for place in range(len(parts[0])):
            of_place: dict[int, list[int]] = {}
            for m, row in enumerate(parts):
                part = row[place]
                if isinstance(part, Computed):
                    of_place.setdefault(part.device, []).append(m)
            for device, microbatches in of_place.items():
                own.setdefault(device, []).append((place, microbatches))
        self._own = dict(sorted(own.items()))
        self._tables: dict[int, Tensor] = {}
        self._handles: list[Handle] = []

    def announce(self, record: StepRecord) -> None:
        """Send the means over each microbatch of what this device computed to all others, and ask for theirs."""
        backend = self._backend
        for source, places in self._own.items():
            if source != backend.device:
                size = sum(len(microbatches) for _, microbatches in places)
                table = torch.empty(size, dtype=torch.float64, device=self._queue.device)
                self._handles.append(backend.receive([table], source))
            else:
                table = torch.cat([self._computed(record, place, found) for place, found in places])
                others = (peer for peer in range(backend.devices) if peer != source)
                self._handles += [backend.send([table], peer) for peer in others]
            self._tables[source] = table

    def _computed(self, record: StepRecord, place: int, microbatches: Sequence[int]) -> Tensor:
        values = []
        for m in microbatches:
            part = self._parts[m][place]
            assert isinstance(part, Computed)
            values.append(record.results[part.name, m])
        return _means(values)

    def total_weight(self, dtype: torch.dtype | None) -> Tensor | float:
        """The sum of the microbatches' weights, in the dtype of those that are computed; added up where they are, so
        that nobody waits for a device."""
        self._arrive()
        total: Tensor | float = 0.0
        places = {
            m: self._tables[source][at]
            for source, own in self._own.items()
            for at, (place, m) in enumerate((place, m) for place, microbatches in own for m in microbatches)
            if place == _WEIGHT
        }
        for m, row in enumerate(self._parts):
            part = row[_WEIGHT]
            total = total + (places[m].to(dtype) if isinstance(part, Computed) else part)
        return total

    def _arrive(self) -> None:
        for handle in self._handles:
            handle.wait()
        self._handles = []  # a handle is waited for once

    def collect(self) -> list[list[float]]:
        """For each microbatch: loss, weight, metrics, and what the step writes into text."""
        self._arrive()
        rows = [[0.0 if isinstance(part, Computed) else part for part in row] for row in self._parts]
        for source, table in self._tables.items():
            values = iter(self._queue.read(table).tolist())
            for place, microbatches in self._own[source]:
                for m in microbatches:
                    rows[m][place] = next(values)
        return rows


def _means(values: list[Tensor]) -> Tensor:
    """The mean of each tensor, as float64."""
    if all(value.ndim == 0 for value in values):
        return torch.stack(values).double()
    return torch.stack([value.double().mean() for value in values])
