"""The calls of a team of ranks, one after another, and what each rank gets; see `..ranks.ranks`."""

from typing import Any

import torch
from panpipe.core.errors import RequestError
from panpipe.runtimes.launch.team import Team


def every_call(team: Team) -> dict[str, Any]:
    """What each call of a team returns on this rank."""
    (device,), mine = team.local, team.rank_here
    background = team.background_exchange()
    return {
        "place": [mine, team.replica, device, team.first],
        "local": team.run_local(lambda device: 10 * device)[device],
        "everywhere": team.everywhere(lambda device: [team.replica, device]),
        "in replica": team.in_replica(lambda device: [team.replica, device]),
        "decided": team.decide(lambda: f"by rank {mine}"),
        "sum": _sum(team, mine),
        "collectively": team.collectively(torch.distributed.get_world_size),
        "numbers": [team.exchange().number, background.number],
        "gathered": [team.exchange().gather(mine), background.gather(mine)],
        "same exchange": team.background_exchange().gather(0) == [0] * 4,
        "replicas": [end.devices if end else None for end in (team.replicas_of(device), team.same_parts_of(device))],
        "message": _message(team, device),
        "clock": abs(team.clock_offset_ns()) < 10**12,
        "refused": [_refusal(lambda: team.decide(_refuse)), _refusal(lambda: team.agree(_own(mine)))],
    }


def _sum(team: Team, mine: int) -> list[int]:
    numbers = torch.tensor([1, mine])
    team.sum_over_processes(numbers).wait()
    return numbers.tolist()


def _message(team: Team, device: int) -> float:
    """The number of the other rank along the pipeline, from it."""
    team.connect([(0, 1), (1, 0)])
    buffer = torch.empty(1)
    handle = team.backend(device).receive([buffer], 1 - device)
    sending = team.backend(device).send([torch.tensor([float(team.rank_here)])], 1 - device)
    handle.wait()
    sending.wait()
    return buffer.item()


def _refuse() -> None:
    raise RequestError("the first device cannot decide")


def _own(mine: int) -> Exception | None:
    return RequestError(f"rank {mine} has no memory") if mine in (1, 2) else None


def _refusal(work: Any) -> str:
    try:
        work()
    except RequestError as error:
        return str(error)
    return "nothing"


def failing_rank(team: Team) -> None:
    """Rank 1 fails in a call of all ranks."""
    team.everywhere(_fail_on_rank_one if team.rank_here == 1 else lambda device: device)


def _fail_on_rank_one(device: int) -> None:
    raise ValueError("the data is missing")
