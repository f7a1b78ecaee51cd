"""Collectives of plain data: what torch's object collectives do, without pickle (see `plain_data`)."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.errors import WorkerError
from ..core.plain_data import decode, encode

_LARGEST_BYTES = 1 << 31
"""Most bytes of one rank's value; a longer announced length is of another program's message."""


def all_gather_data(value: Any, group: Any = None) -> list[Any]:
    """The values of all ranks of a group, in the order of its ranks. All of them call this together.

    Args:
        value: plain data; its length may differ between ranks.
        group: the process group; the default one if None.

    Raises:
        TypeError: the value is no plain data.
        WorkerError: a rank sent bytes that are no plain data.
    """
    data = _bytes(value, group)
    lengths = torch.empty(dist.get_world_size(group), dtype=torch.int64, device=data.device)
    own = torch.tensor([data.numel()], dtype=torch.int64, device=data.device)
    dist.all_gather(list(lengths.split(1)), own, group=group)
    sizes = [_checked(size) for size in lengths.tolist()]
    # Ranks send the same number of bytes, because collectives need equal shapes.
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=data.device)
    padded[: data.numel()] = data
    found = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded, group=group)
    return [_value(each[:size], rank) for rank, (each, size) in enumerate(zip(found, sizes, strict=True))]


def broadcast_data(value: Any, source: int) -> Any:
    """The value of one rank on all ranks of the default group. All of them call this together.

    Args:
        value: plain data; ignored on the other ranks.
        source: the rank that has it.

    Raises:
        TypeError: the value is no plain data.
        WorkerError: the rank sent bytes that are no plain data.
    """
    mine = dist.get_rank() == source
    data = _bytes(value if mine else None, None)
    length = torch.tensor([data.numel()], dtype=torch.int64, device=data.device)
    dist.broadcast(length, source)
    if not mine:
        data = torch.empty(_checked(int(length)), dtype=torch.uint8, device=data.device)
    dist.broadcast(data, source)
    return _value(data, source)


def _bytes(value: Any, group: Any) -> Tensor:
    """A value's bytes, on a device that the group's collectives support."""
    data = torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8)
    own: Any = group or dist.group.WORLD
    where = own._device_types
    if any(device.type == "cpu" for device in where):
        return data
    return data.to(torch.device(where[0].type, torch.accelerator.current_device_index()))


def _checked(size: int) -> int:
    if not 0 < size <= _LARGEST_BYTES:
        raise WorkerError(
            f"a rank announced plain data of {size} bytes: all ranks must run the same version of panpipe"
        )
    return size


def _value(data: Tensor, rank: int) -> Any:
    try:
        return decode(data.cpu().numpy().tobytes())
    except ValueError as error:
        raise WorkerError(
            f"rank {rank} sent data that cannot be read ({error}): all ranks must run the same version of panpipe"
        ) from error


def group_store(kind: str, ranks: Sequence[int], place: int) -> Any:
    """A part of the job's store for one group, the same for all its ranks if they create their groups in one order.

    ``dist.new_group`` needs all ranks of the job for every group. Its ``use_local_synchronization`` names a group after
    its ranks and the number of groups that a rank has, which differs between ranks, so that they would wait forever.

    Args:
        ranks: of the group, in the job.
        place: this rank's index among them.
    """
    c10d = dist.distributed_c10d
    store = c10d._get_default_store()
    name = f"panpipe/{kind}/{','.join(map(str, ranks))}"
    return c10d.PrefixStore(f"{name}/{store.add(f'{name}/{ranks[place]}', 1)}", store)
