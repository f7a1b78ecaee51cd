"""Trains models of the zoo one after another: ``worker.py RESULTS NAME...``.

Each model is captured once, trained over threads, and then over gloo by three processes that fork from this one: they
have what is captured, and the programs of the stages, which take the most time. Lines of JSON go to RESULTS: one when a
model begins, and one for every check.
"""

import json
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from panpipe.core.errors import PanpipeError
from panpipe.core.plan.plan import Plan
from panpipe.runtimes.diagnose.doctor import SCHEDULES, TOLERANCES, Check, CheckedModel
from panpipe.runtimes.launch.rank_team import RankTeam
from panpipe.runtimes.launch.team import Team, ThreadTeam

from tests.support.offloading import all_away
from tests.zoo.models import ZOO

ROWS, WORLDS = 6, (2, 3)
Result = dict[str, object]


def native_threads() -> int:
    """Threads of this process. One that ends may hold a lock of a library, which would stay locked in a fork."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else 0


def forked(work: Callable[[int, int], None]) -> bool:
    """Run ``work(rank, port)`` in a process for each rank; where one fails, the others end as well. Whether none did.

    What forks may not have run a backward with accelerators, and has no threads but this one.
    """
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    ranks = [_fork(work, rank, port) for rank in range(max(WORLDS))]
    left, well = set(ranks), True
    while left:
        ended, status = os.wait()
        left.discard(ended)
        well = well and status == 0
        for rank in left if status else ():
            os.kill(rank, signal.SIGKILL)
    return well


def _fork(work: Callable[[int, int], None], rank: int, port: int) -> int:
    child = os.fork()
    if child == 0:
        try:
            work(rank, port)
            os._exit(0)
        finally:
            os._exit(1)
    return child


def teams(rank: int, port: int) -> Iterator[Callable[[], Team]]:
    """This rank's part in groups of two and of three; groups come and go, the store stays."""
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=timedelta(seconds=300))
    for world in WORLDS:
        if rank < world:
            group = dist.PrefixStore(str(world), store)
            dist.init_process_group("gloo", store=group, rank=rank, world_size=world)
            yield RankTeam
            dist.destroy_process_group()
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < max(WORLDS):
        time.sleep(0.01)


def admitted(name: str) -> CheckedModel:
    entry = ZOO[name]
    torch.manual_seed(0)
    dtype = torch.float64 if entry.float64 else torch.float32
    return CheckedModel(entry.make().train(), entry.step, entry.batch(ROWS), 3, dtype)


def trained(name: str, backend: str, checked: CheckedModel, check: Check) -> Result:
    """What one plan gave."""
    far = check.distance
    return {
        "backend": backend,
        "devices": check.devices,
        "schedule": check.schedule,
        "operators": len(checked.operators.graph.nodes),
        "python": sorted(checked.operators.step.regions),
        "outcome": _outcome(name, checked, check),
        "problem": check.problem or (f"{far.undefined} values are not finite" if far and far.undefined else ""),
        "dtype": str(checked.dtype).removeprefix("torch."),
        **(
            {kind: getattr(far, kind) for kind in ("loss", "gradient", "parameter", "buffer", "undefined")}
            if far
            else {}
        ),
        "worst": dict(far.worst) if far else {},
        "seconds": check.seconds,
        "capture_s": checked.capture_s,
    }


def _outcome(name: str, checked: CheckedModel, check: Check) -> str:
    if check.distance is None:
        return refused(name, check.problem)
    if ZOO[name].refusal:
        return "wrong"  # it trains, and was to be refused: the entry is out of date
    return "right" if check.distance.within(*TOLERANCES[checked.dtype]) else "wrong"


def refused(name: str, problem: str) -> str:
    """The outcome of a refusal: ``refused``, or ``crashed`` where it is not the one that the zoo expects."""
    expected = ZOO[name].refusal
    return "refused" if expected and expected in problem else "crashed"


def check_by_all_plans(name: str, write: Callable[..., None]) -> None:
    """Check a model, and write down what each check found."""
    try:
        checked = admitted(name)
    except PanpipeError as error:
        for backend in ("threads", "gloo"):
            write(backend=backend, outcome=refused(name, str(error)), problem=str(error))
        return
    before = native_threads()
    for world in WORLDS:
        check_on(lambda world=world: ThreadTeam(world), name, "threads", checked, write)
    until = time.monotonic() + 2
    while native_threads() > before and time.monotonic() < until:
        time.sleep(0.01)

    def over_gloo(rank: int, port: int) -> None:
        with writing_failures(write):
            for make in teams(rank, port):
                check_on(make, name, "gloo", checked, write)

    if not forked(over_gloo):
        write(backend="gloo", outcome="crashed", problem="died: a rank")


def check_on(
    make: Callable[[], Team], name: str, backend: str, checked: CheckedModel, write: Callable[..., None]
) -> None:
    """Check by each schedule, on a team of its own; over two ranks also with everything offloaded that may be."""
    for schedule, chunks in SCHEDULES:
        team = make()
        check = checked.check(team, schedule, chunks)
        if 0 in team.local:
            write(**trained(name, backend, checked, check))
        team.close()
    if backend == "gloo" and dist.get_world_size() == min(WORLDS):
        check_offloaded(make(), name, checked, write)


def check_offloaded(team: Team, name: str, checked: CheckedModel, write: Callable[..., None]) -> None:
    """Check GPipe with every storage offloaded that may be, and write how many there were."""
    storages = 0

    def offloaded(plan: Plan) -> Plan:
        nonlocal storages
        plan = all_away(plan, checked.operators, known=checked.programs.known)
        storages = sum(len(stage.storages) for stage in plan.memory.offload)
        return plan

    check = checked.check(team, "gpipe", 1, change=offloaded)
    if 0 in team.local:
        write(**trained(name, "gloo", checked, check), offloaded=storages)
    team.close()


@contextmanager
def writing_failures(write: Callable[..., None]) -> Iterator[None]:
    """Write down an exception of panpipe's own before it is raised: a row of the table."""
    try:
        yield
    except Exception as error:
        write(backend="both", outcome="crashed", problem=f"{type(error).__name__}: {error}"[:300])
        raise


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results, *names = sys.argv[1:]
    with Path(results).open("a", encoding="utf-8") as file:
        for name in names:

            def write(name: str = name, **result: object) -> None:
                print(json.dumps({"model": name, **result}), file=file, flush=True)

            print(json.dumps({"begins": name}), file=file, flush=True)
            with suppress(Exception), writing_failures(write):
                check_by_all_plans(name, write)


if __name__ == "__main__":
    main()
