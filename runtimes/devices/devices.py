"""Assigns a torch device to each device of the pipeline.

``devices="cuda:0,cuda:1"`` lists the devices of all threads of one process, or of all ranks in order, each name on that
rank's host. Several devices of a pipeline on one GPU are for tests, and must be requested with
``Run(share_devices=True)``; they always may share the CPU.
"""

import os
from collections.abc import Iterable, Mapping, Sequence

import torch

from ...backends.kind import identity
from ...core.errors import RequestError
from ..launch.team import Team

Names = str | torch.device | Sequence[str | torch.device]
"""``"cuda:0,cuda:1"``, one device, a list of such names or devices, or ``"cuda"`` for one GPU each."""

_SHARE = "give run=panpipe.Run(share_devices=True) to share one"


def parse_devices(names: Names) -> tuple[torch.device, ...] | None:
    """The listed devices, all of one type; None for ``"cuda"``: one GPU each.

    Raises:
        RequestError: a name is no device of this machine, or there are several types.
    """
    if names == "cuda":
        _check_there(torch.device("cuda", 0), "cuda")
        return None
    if isinstance(names, torch.device):
        names = [names]
    elif not isinstance(names, Iterable):
        raise RequestError(
            f"devices is {names!r}: name one for each device of the pipeline, such as 'cuda:0,cuda:1'; mesh=2 gives "
            "their number"
        )
    parts = [part.strip() for part in names.split(",")] if isinstance(names, str) else list(names)
    if not parts:
        raise RequestError("devices is empty: name one for each device of the pipeline, such as 'cuda:0,cuda:1'")
    found = tuple(_device(part) for part in parts)
    other = next((device for device in found if device.type != found[0].type), None)
    if other is not None:
        raise RequestError(
            f"devices names {found[0]} and {other}: a pipeline's programs are for one type of device; name one type"
        )
    return found


def _device(name: str | torch.device) -> torch.device:
    try:
        found = torch.device(name)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in ("cpu", "cuda") or (found.type == "cuda") != (found.index is not None):
        raise RequestError(f"devices names '{name}': write cpu, or a GPU with its number, such as cuda:0")
    _check_there(found, str(name))
    return torch.device("cpu") if found.type == "cpu" else found


def _check_there(device: torch.device, name: str) -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        several = f"the GPUs here are cuda:0 to cuda:{count - 1}" if count > 1 else "the only GPU here is cuda:0"
        there = several if count else "PyTorch finds no GPU here"
        raise RequestError(f"devices names '{name}': {there}; name devices of this machine")


def device_of_rank(devices: tuple[torch.device, ...] | None, rank: int, ranks: int) -> torch.device:
    """The device of one rank, before the rendezvous.

    Args:
        devices: from `parse_devices`.
        rank, ranks: this rank, and the number of ranks.
    """
    if devices is None:
        # SLURM and Ray may show each rank its own GPU alone. `assign_devices` refuses ranks that have the same one.
        local = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", rank))
        found = torch.device("cuda", 0 if torch.cuda.device_count() == 1 else int(local))
        _check_there(found, str(found))
        return found
    _check_count(devices, ranks, "the job", "ranks")
    return devices[rank]


def assign_devices(
    team: Team, devices: tuple[torch.device, ...] | None, model: torch.device, share: bool, named: bool
) -> Mapping[int, torch.device]:
    """Device of this process → its torch device.

    Args:
        team: the devices of the pipeline; all of its processes call this together.
        devices: from `parse_devices`; None for one GPU each.
        named: whether the user gave ``devices=``; if not, each rank uses its model's device, threads share the CPU, and
            threads on GPUs get one GPU each.

    Raises:
        RequestError: there are too few or too many, or several are the same GPU without ``share``.
    """
    ranks = len(team.local) < team.size or team.replicas > 1
    if ranks:
        here = device_of_rank(devices, team.rank_here, team.mesh.ranks) if named else model
        found = {team.local[0]: here}
    elif not named and (model.type == "cpu" or share):
        found = dict.fromkeys(team.local, model)
    elif devices is None:
        count = torch.cuda.device_count()
        if count < team.size:
            raise RequestError(
                f"the pipeline has {team.size} devices and this machine has {count} GPU{'s' * (count != 1)}: each "
                f"device needs one; plan for {count}, or {_SHARE}"
            )
        found = {device: torch.device("cuda", device) for device in team.local}
    else:
        _check_count(devices, team.size, "the pipeline", "devices")
        found = dict(enumerate(devices))
    if (named or model.type == "cuda") and not share:
        _refuse_shared(team, found)
    return found


def _check_count(devices: Sequence[torch.device], wanted: int, whose: str, what: str) -> None:
    if len(devices) != wanted:
        raise RequestError(f"devices names {len(devices)} and {whose} has {wanted} {what}: name one for each")


def _refuse_shared(team: Team, found: Mapping[int, torch.device]) -> None:
    places = team.everywhere(lambda device: (identity(found[device]), str(found[device])))
    first: dict[str, int] = {}
    for number, (one, name) in enumerate(places):
        if name != "cpu" and one in first:
            raise RequestError(
                f"devices {first[one]} and {number} of the pipeline are both {name} ({one}): each needs its own; name "
                f"another, or {_SHARE}"
            )
        first[one] = number
