"""The values that replicas exchange in addition to gradients: losses, weights, metrics and written buffers.

Gradients are summed in `buckets`, and by `shards` where replicas share them.

As in DistributedDataParallel, parameters and buffers start with the first replica's values. Buffers that its forward
writes, such as BatchNorm's running statistics, are copied to the other replicas after every step.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...backends.contract import Backend
from ...core.plain_data import decode, encode
from ..devices.compute import ComputeQueue
from ..launch.team import Team

Rows = list[list[float]]
"""For each microbatch: loss, weight, metrics."""


def sum_rows(rows: Tensor, replicas: Backend, microbatches: int, marked: bool = False) -> Tensor:
    """The rows of all replicas: an all-reduce of a table in which each replica fills its own rows.

    The host does not wait for the device.

    Args:
        rows: of this replica, float64: a row for each microbatch of its batch, with loss, weight and metrics.
        microbatches: the largest number of microbatches of a replica.
        marked: whether this replica reports that its ranks have different batches.

    Returns:
        [replica, microbatch, 1 + column]; the first column is 0 for a microbatch that a replica does not have, 2 if the
        replica is marked, and otherwise 1.
    """
    count, columns = rows.shape
    table = rows.new_zeros(replicas.devices, microbatches, 1 + columns)
    own = table[replicas.device, :count]
    own[:, 0].fill_(1.0 + marked)
    own[:, 1:].copy_(rows)
    replicas.all_reduce(table).wait()
    return table


def gathered(table: Tensor) -> tuple[list[Rows], int | None]:
    """The rows by replica, and the first replica that is marked, if any."""
    found = table.tolist()
    first = next((number for number, of_one in enumerate(found) if of_one[0][0] > 1), None)
    return [[values for there, *values in of_one if there] for of_one in found], first


def sum_over_replicas(numbers: Sequence[Tensor | float], replicas: Backend, queue: ComputeQueue) -> Tensor:
    """The sums of all replicas' numbers; the host does not wait for the device."""
    there = [n if isinstance(n, Tensor) else queue.upload(torch.tensor(n, dtype=torch.float64)) for n in numbers]
    sums = torch.stack([number.double() for number in there])
    replicas.all_reduce(sums).wait()
    return sums


def gather_values(value: Any, replicas: Backend, where: torch.device) -> list[Any]:
    """The values of all replicas, in their order; all of them call this together.

    Args:
        value: of this replica: plain data.
    """
    data = torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8)
    sizes = torch.zeros(replicas.devices, dtype=torch.int64)
    sizes[replicas.device] = data.numel()
    sizes = sizes.to(where)
    replicas.all_reduce(sizes).wait()
    most = int(sizes.max())
    table = torch.zeros(replicas.devices, most, dtype=torch.uint8)
    table[replicas.device, : data.numel()] = data
    table = table.to(where).view(-1)
    replicas.all_gather(table).wait()
    rows = table.cpu().view(replicas.devices, most)
    return [decode(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes.tolist(), strict=True)]


def broadcast_from_first(tensors: Sequence[Tensor], replicas: Backend) -> None:
    """Broadcast some tensors of the first replica to all others.

    Args:
        tensors: of one device; of the same shapes and dtypes in all replicas.
    """
    if not tensors:
        return
    if replicas.device == 0:
        replicas.broadcast([tensor.detach().contiguous() for tensor in tensors], 0).wait()
        return
    received = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]
    replicas.broadcast(received, 0).wait()
    with torch.no_grad():
        for tensor, value in zip(tensors, received, strict=True):
            tensor.copy_(value)


def broadcast_initial_values(team: Team, own: Mapping[int, Sequence[Tensor]]) -> None:
    """Broadcast the first replica's parameters and buffers to all others."""
    if team.replicas == 1:
        return

    def work(device: int) -> None:
        replicas = team.replicas_of(device)
        assert replicas is not None
        broadcast_from_first(own[device], replicas)

    team.run_local(work)
