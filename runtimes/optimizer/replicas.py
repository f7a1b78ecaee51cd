"""What replicas of a pipeline tell each other beside gradients: their microbatches' losses, and buffers that change.

As in DistributedDataParallel, parameters and buffers begin as the first replica's, and what its forward writes into
buffers, such as BatchNorm's running statistics, counts: after every step the others take it over.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...backends.contract import Backend
from ..devices.compute import ComputeQueue
from ..launch.team import Team

Rows = list[list[float]]
"""For each microbatch: loss, weight, metrics."""


def rows_of_all(
    rows: Rows, replicas: Backend, microbatches: int, columns: int, where: torch.device, marked: bool = False
) -> tuple[Rows, int | None]:  # fmt: skip
    """The rows of all replicas, in their order: an all-reduce of a table in which each fills in its own.

    Args:
        rows: of this replica; as many as its batch has microbatches.
        replicas: this device's end to its replicas.
        microbatches: the most that a replica may have.
        columns: loss, weight and metrics; what stands behind them stays here.
        where: the device's tensors are there.
        marked: whether this replica has something to say to all: that its ranks have different batches.

    Returns:
        The rows, and the first replica that is marked, if any.
    """
    table = torch.zeros(replicas.devices, microbatches, 1 + columns, dtype=torch.float64)
    there = 1.0 + marked
    own = torch.tensor([[there, *row[:columns]] for row in rows], dtype=torch.float64)
    table[replicas.device, : len(rows)] = own
    table = table.to(where)
    replicas.all_reduce(table).wait()
    found = table.tolist()
    first = next((number for number, of_one in enumerate(found) if of_one[0][0] > 1), None)
    return [values for of_one in found for there, *values in of_one if there], first


def totals_of_all(numbers: Sequence[Tensor | float], replicas: Backend, queue: ComputeQueue) -> Tensor:
    """The sums of every replica's numbers; the host waits for none that is on a device.

    Args:
        numbers: of this replica, scalars.
        replicas: this device's end to its replicas.
        queue: where it computes.
    """
    there = [n if isinstance(n, Tensor) else queue.upload(torch.tensor(n, dtype=torch.float64)) for n in numbers]
    sums = torch.stack([number.double() for number in there])
    replicas.all_reduce(sums).wait()
    return sums


def share(tensors: Sequence[Tensor], replicas: Backend) -> None:
    """Give all replicas what the first one has in some tensors.

    Args:
        tensors: of one device; of the same shapes and dtypes everywhere.
        replicas: its end to its replicas.
    """
    if not tensors:
        return
    if replicas.device == 0:
        sent = [tensor.detach().contiguous() for tensor in tensors]
        for handle in [replicas.send(sent, peer) for peer in range(1, replicas.devices)]:
            handle.wait()
        return
    received = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]
    replicas.receive(received, 0).wait()
    with torch.no_grad():
        for tensor, value in zip(tensors, received, strict=True):
            tensor.copy_(value)


def begin_equal(team: Team, own: Mapping[int, Sequence[Tensor]]) -> None:
    """Give all replicas the first one's parameters and buffers.

    Args:
        team: the devices.
        own: what each device of this process holds.
    """
    if team.replicas == 1:
        return

    def work(device: int) -> None:
        replicas = team.replicas_of(device)
        assert replicas is not None
        share(own[device], replicas)

    team.run_local(work)
