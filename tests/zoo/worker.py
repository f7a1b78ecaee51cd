"""Trains models of the zoo one after another: ``worker.py RESULTS NAME...``.

Three of these are started, with RANK, MASTER_ADDR and MASTER_PORT set. Each captures a model once. The first trains it
over threads; then two of them, and all three, train it over gloo. Lines of JSON go to RESULTS: one when a model begins,
and one for every check.
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
        if not dist.is_initialized():
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
        "backend": backend,
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


def checks(name: str, ranks: Ranks) -> Iterator[Result]:
    """Check a model by all plans.

    Yields:
        What each check found, on the rank that reports it.
    """
    try:
        patient = admitted(name)
    except PanpipeError as error:
        for backend in ("threads", "gloo") if ranks.rank == 0 else ():
            yield {"backend": backend, "outcome": refused(name, str(error)), "problem": str(error)}
        return
    if ranks.rank == 0:
        for world in WORLDS:
            yield from checked_by(lambda world=world: ThreadTeam(world), name, "threads", patient)
    for make in ranks.teams():
        if make is not None:
            yield from checked_by(make, name, "gloo", patient)
            dist.destroy_process_group()


def checked_by(make: Callable[[], Team], name: str, backend: str, patient: Patient) -> Iterator[Result]:
    """Check by each schedule, on a team of its own."""
    for schedule, chunks in SCHEDULES:
        team = make()
        check = patient.check(team, schedule, chunks)
        if 0 in team.local:
            yield trained(name, backend, patient, check)
        team.close()


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results, *names = sys.argv[1:]
    ranks = Ranks()
    with Path(results).open("a", encoding="utf-8") as file:

        def write(**result: object) -> None:
            print(json.dumps(result), file=file, flush=True)

        for name in names:
            write(begins=name)
            try:
                for result in checks(name, ranks):
                    write(model=name, **result)
            except Exception as error:
                write(model=name, backend="both", outcome="crashed", problem=f"{type(error).__name__}: {error}"[:300])
                raise  # other ranks may wait for this one: another crew goes on after this model


if __name__ == "__main__":
    main()
