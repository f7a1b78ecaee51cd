"""Trains models of the zoo one after another: ``worker.py threads|gloo RESULTS NAME...``.

Lines of JSON go to RESULTS: one when a model begins, and one for every check. For gloo three of these are started, with
RANK, MASTER_ADDR and MASTER_PORT set; each model is captured once in each, and trained by two of them and by all three.
"""

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from panpipe.core.errors import PanpipeError
from panpipe.runtimes.doctor import SCHEDULES, TOLERANCES, Check, Patient
from panpipe.runtimes.team import RankTeam, Team, ThreadTeam

from tests.zoo.models import ZOO

ROWS, WORLDS = 6, (2, 3)
Result = dict[str, object]


def threads() -> Iterator[Callable[[], Team]]:
    for world in WORLDS:
        yield lambda world=world: ThreadTeam(world)


class Ranks:
    """This process's part in groups of two and of three; groups come and go, the store stays."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._store = dist.TCPStore(address, port, is_master=self.rank == 0, timeout=timedelta(seconds=300))
        self._groups = 0

    def teams(self) -> Iterator[Callable[[], Team] | None]:
        for world in WORLDS:
            self._groups += 1
            yield (lambda world=world: self._team(world)) if self.rank < world else None

    def _team(self, world: int) -> Team:
        store = dist.PrefixStore(str(self._groups), self._store)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=world)
        return RankTeam()


def admitted(name: str) -> Patient:
    entry = ZOO[name]
    torch.manual_seed(0)
    dtype = torch.float64 if entry.float64 else torch.float32
    return Patient(entry.make().train(), entry.step, entry.batch(ROWS), 3, dtype)


def trained(name: str, backend: str, patient: Patient, check: Check) -> Result:
    """What one plan gave."""
    far = check.distance
    return {
        "devices": check.devices,
        "schedule": check.schedule,
        "operators": len(patient.operators.graph.nodes),
        "python": sorted(patient.operators.step.regions),
        "outcome": _outcome(name, patient, check),
        "problem": check.problem,
        "dtype": str(patient.dtype).removeprefix("torch."),
        **({kind: getattr(far, kind) for kind in ("loss", "gradient", "parameter", "buffer")} if far else {}),
        "worst": dict(far.worst) if far else {},
        "seconds": check.seconds,
        "capture_s": patient.capture_s,
    }


def _outcome(name: str, patient: Patient, check: Check) -> str:
    if check.distance is None:
        return refused(name, check.problem)
    if ZOO[name].refusal:
        return "wrong"  # it trains, and was to be refused: the entry is out of date
    return "right" if check.distance.within(*TOLERANCES[patient.dtype]) else "wrong"


def refused(name: str, problem: str) -> str:
    """The outcome of a refusal: ``refused``, or ``crashed`` where it is not the one that the zoo expects."""
    expected = ZOO[name].refusal
    return "refused" if expected and expected in problem else "crashed"


def checks(name: str, backend: str, ranks: "Ranks | None") -> Iterator[Result | None]:
    """Check a model by all plans.

    Yields:
        What each check found; None on a rank that has no part in one, or that does not report it.
    """
    try:
        patient = admitted(name)
    except PanpipeError as error:
        yield {"outcome": refused(name, str(error)), "problem": str(error)}
        return
    for make in ranks.teams() if ranks is not None else threads():
        if make is None:
            yield None
            continue
        for schedule, chunks in SCHEDULES:
            team = make() if ranks is None or not dist.is_initialized() else RankTeam()
            check = patient.check(team, schedule, chunks)
            yield trained(name, backend, patient, check) if 0 in team.local else None
            team.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    backend, results, *names = sys.argv[1:]
    ranks = Ranks() if backend == "gloo" else None
    with Path(results).open("a", encoding="utf-8") as file:

        def write(**result: object) -> None:
            print(json.dumps({"backend": backend, **result}), file=file, flush=True)

        for name in names:
            write(begins=name)
            try:
                for result in checks(name, backend, ranks):
                    if result is not None:
                        write(model=name, **result)
            except Exception as error:  # of panpipe's own: a row of the table
                if dist.is_initialized():
                    raise  # other ranks may wait for this one: the crew starts anew after this model
                write(model=name, outcome="crashed", problem=f"{type(error).__name__}: {error}"[:300])


if __name__ == "__main__":
    main()
