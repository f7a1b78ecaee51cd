"""The parts of a step's result, carried from the devices that compute them to all of them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..backends.contract import Backend, Handle
from ..core.capture.step import StepOutputs
from .executor import StepRecord


class SharedResults:
    """Loss, weight and metrics of one step at one device.

    `announce` sends what this device computed, posts receives for the rest, and does not wait: the last stage has its
    results while the first ones are still at work. `collect` waits.

    Args:
        outputs: what the step returns.
        sources: node → the device that computes it.
        backend: this device's end of the transport.
        where: the device's tensors are there.
        shares: each microbatch's share of the batch.
    """

    def __init__(
        self, outputs: StepOutputs, sources: Mapping[str, int], backend: Backend, where: torch.device,
        shares: Sequence[float],
    ) -> None:  # fmt: skip
        self._backend, self._where, self._shares = backend, where, shares
        metrics = [node for node in outputs.metrics.values() if isinstance(node, str)]
        self._columns = [outputs.loss, outputs.weight, *metrics, *outputs.texts]
        own: dict[int, list[int]] = {}
        for place, node in enumerate(self._columns):
            if isinstance(node, str):
                own.setdefault(sources[node], []).append(place)
        self._own = dict(sorted(own.items()))
        self._tables: dict[int, Tensor] = {}
        self._handles: list[Handle] = []

    def announce(self, record: StepRecord) -> None:
        """Send the means over each microbatch of what this device computed to all others, and ask for theirs."""
        backend = self._backend
        for source, places in self._own.items():
            if source != backend.device:
                table = torch.empty(len(self._shares), len(places), dtype=torch.float64, device=self._where)
                self._handles.append(backend.receive([table], source))
            else:
                table = torch.stack([self._computed(record, place) for place in places], dim=1)
                others = (peer for peer in range(backend.devices) if peer != source)
                self._handles += [backend.send([table], peer) for peer in others]
            self._tables[source] = table

    def _computed(self, record: StepRecord, place: int) -> Tensor:
        name = self._columns[place]
        assert isinstance(name, str)
        return _means([record.results[name, m] for m in range(len(self._shares))])

    def collect(self) -> list[list[float]]:
        """For each microbatch: loss, weight (the microbatch's share where the step returns none), metrics, and what the
        step writes into text."""
        for handle in self._handles:
            handle.wait()
        rows = [[share] * len(self._columns) for share in self._shares]
        for source, table in self._tables.items():
            for row, values in zip(rows, table.tolist(), strict=True):
                for place, value in zip(self._own[source], values, strict=True):
                    row[place] = value
        return rows


def _means(values: list[Tensor]) -> Tensor:
    """The mean of each tensor, as float64."""
    if all(value.ndim == 0 for value in values):
        return torch.stack(values).double()
    return torch.stack([value.double().mean() for value in values])
