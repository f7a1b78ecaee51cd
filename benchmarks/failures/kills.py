"""Kills ranks at random moments of training, restarts the job, and compares it with an undisturbed one.

Each trial draws a mesh of 2 to 4 ranks, a rank, a phase of the job, and a moment in that phase. The rank is killed
(``SIGKILL``) there. Then every other rank must end by itself, with one line that names the killed rank. The job is
started again and continues from its last checkpoint: from then on every loss, and at the end every parameter, must have
the bits of the undisturbed run::

    python benchmarks/failures/kills.py [KILLS] [--seed SEED] [--seconds SECONDS]

Ranks are forks of a process that has imported everything, and have no torchrun agent: rank 0 hosts the job's store.
"""

import atexit
import importlib
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

import panpipe
import torch
from attrs import Factory, define, frozen
from cattrs import structure, unstructure
from panpipe.benchmarks.driver import argument_parser, free_port, rank_environment, report
from torch import nn

MESHES = {"pp=2": 2, "pp=3": 3, "pp=4": 4, "dp=2,pp=2": 4}
"""Each mesh, with its number of ranks; with replicas, two ranks next to each other are one of them."""
PHASES = ("build", "resume", "step", "between", "evaluate", "checkpoint", "background", "close")
STEPS, EVERY = 8, 2
"""Steps of a job, and between two checkpoints: one of the two that follow each other is written in the background."""
IMPORTED = ("torch._dynamo", "torch.export", "torch.distributed.device_mesh", "panpipe.api", "numba")
"""Modules that this process imports before it forks ranks, so that each of them starts at once."""
HANGS_S = 900.0
"""Seconds after which a job that has not ended hangs: on a busy machine a job takes minutes."""


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The training step."""
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def model() -> nn.Module:
    """The model, equal on all ranks; its dropout needs the random numbers of the undisturbed run."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1)) for _ in range(4)))


def batch_of(step: int, replica: int) -> dict[str, torch.Tensor]:
    """The batch of a step, another one in each."""
    generator = torch.Generator().manual_seed(1000 * step + replica)
    return {name: torch.randn(8, 16, generator=generator) for name in ("x", "y")}


@frozen
class Moment:
    """When a rank is killed: some time after it enters a phase for the nth time."""

    phase: str
    entry: int
    delay_s: float


class Phases:
    """The phases of this rank: their durations, and the moment at which it is killed; None for a rank that lives."""

    def __init__(self, folder: Path, moment: Moment | None) -> None:
        self._folder, self._moment = folder, moment
        self._entries = Counter[str]()
        self._now = ""
        self.seconds: dict[str, list[float]] = {phase: [] for phase in PHASES}

    @contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        """A context in which the rank is in a phase."""
        self._now, begun = phase, time.monotonic()
        self._entries[phase] += 1
        moment = self._moment
        if moment is not None and (moment.phase, moment.entry) == (phase, self._entries[phase]):
            threading.Thread(target=self._die, args=(moment.delay_s,), daemon=True).start()
        yield
        self.seconds[phase].append(time.monotonic() - begun)
        self._now = f"after {phase}"

    def _die(self, delay_s: float) -> None:
        time.sleep(delay_s)
        descriptor = os.open(self._folder / "killed", os.O_WRONLY | os.O_CREAT)
        os.write(descriptor, self._now.encode())
        os.kill(os.getpid(), signal.SIGKILL)


@define
class Log:
    """The record of a rank in its last start.

    Args:
        begins: the step that it began with.
        losses: step → loss, in hexadecimal.
        saved: the step of the last checkpoint that was complete.
        end: parameter → hash, of the rank's stages, which may have no parameters; None if it did not get there.
        seconds: phase → durations.
    """

    begins: int = 0
    losses: dict[int, str] = Factory(dict)
    saved: int = 0
    end: dict[str, str] | None = None
    seconds: dict[str, list[float]] = Factory(dict)


def train(mesh: str, folder: Path, rank: int, moment: Moment | None) -> None:
    """What a rank does: it continues from the last checkpoint, and records its losses and last parameters."""
    replica = rank // 2 if mesh.startswith("dp") else 0
    phases, log = Phases(folder, moment), Log()

    def write() -> None:
        new = folder / f"{rank}.new"
        new.write_text(json.dumps(unstructure(log)), encoding="utf-8")
        new.replace(folder / f"{rank}.log")

    plan: Any = folder.parent / f"{mesh}.json"
    with phases.inside("build"):
        pipe = panpipe.pipeline(
            model(), step, batch_of(0, replica), optimizer=torch.optim.Adam, microbatches=2, mesh=mesh,
            plan=plan if plan.exists() else panpipe.Auto(schedule="1f1b", max_chunks=1),
            run=panpipe.Run(progress=False),
        )  # fmt: skip
    last = panpipe.latest_checkpoint(folder)
    if last is not None:
        with phases.inside("resume"):
            pipe.resume(last)
    log.begins = pipe.metrics.steps
    write()
    while pipe.metrics.steps < STEPS:
        with phases.inside("step"):
            loss = pipe.step(batch_of(pipe.metrics.steps, replica))
        log.losses[pipe.metrics.steps] = loss.item().hex()
        write()
        with phases.inside("between"):
            time.sleep(0.01)
        if pipe.metrics.steps % EVERY == 0:
            waits = pipe.metrics.steps % (2 * EVERY) == 0
            with phases.inside("checkpoint" if waits else "background"):
                pipe.checkpoint(folder / f"step-{pipe.metrics.steps}", wait=waits)
            if waits:
                log.saved = pipe.metrics.steps
                write()
        if pipe.metrics.steps == STEPS // 2 + 1:
            with phases.inside("evaluate"):
                pipe.evaluate(batch_of(99, replica))
    log.end = {
        name: sha256(parameter.detach().numpy().tobytes()).hexdigest()
        for parameters in pipe._session.stage_parameters.values()
        for name, parameter in parameters.items()
    }
    write()
    if rank == 0 and not plan.exists():
        plan.write_text(panpipe.plan_json(pipe.plan), encoding="utf-8")
    with phases.inside("close"):
        pipe.close()
    log.seconds = phases.seconds
    write()


def end_with(work: Callable[[], None]) -> NoReturn:
    """Do a rank's work in a fork, and end it: this never returns to what the parent does."""
    status = 0
    try:
        work()
    except BaseException as error:
        sys.last_value = error  # as the interpreter does: it is the failure that exit functions see
        sys.excepthook(*sys.exc_info())
        status = 1
    # The interpreter would take seconds more, on a busy machine 20, to free what the parent has imported.
    atexit._run_exitfuncs()
    os._exit(status)


def run_job(
    mesh: str, folder: Path, victim: int | None = None, moment: Moment | None = None
) -> tuple[dict[int, int], dict[int, float]]:
    """One start of all ranks, each a fork of this process: for each its exit status and the time of its end.

    Ranks that hang are killed and have no entry.
    """
    port, children = free_port(), list[int]()
    for rank in range(MESHES[mesh]):
        children.append(os.fork())
        if children[-1] == 0:
            os.environ.update(rank_environment(rank, port, MESHES[mesh]))
            os.dup2(os.open(folder / f"{rank}.err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            end_with(partial(train, mesh, folder, rank, moment if rank == victim else None))
    statuses, times, deadline = dict[int, int](), dict[int, float](), time.monotonic() + HANGS_S
    while len(statuses) < len(children) and time.monotonic() < deadline:
        for rank, child in enumerate(children):
            if rank not in statuses:
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    statuses[rank], times[rank] = os.waitstatus_to_exitcode(status), time.time()
        time.sleep(0.005)
    for rank, child in enumerate(children):
        if rank not in statuses:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return statuses, times


def logs(mesh: str, folder: Path) -> list[Log]:
    """Of all ranks."""
    paths = [folder / f"{rank}.log" for rank in range(MESHES[mesh])]
    return [structure(json.loads(path.read_text(encoding="utf-8")), Log) if path.exists() else Log() for path in paths]


def remove_logs(folder: Path) -> None:
    """Remove what the ranks of the last start wrote."""
    for path in (*folder.glob("*.log"), *folder.glob("*.err"), folder / "killed"):
        path.unlink(missing_ok=True)


@frozen
class Trial:
    """One kill, and the restart; ``resumed`` if the killed job began from a checkpoint of the undisturbed one."""

    mesh: str
    victim: int
    moment: Moment
    resumed: bool

    @classmethod
    def drawn(cls, draw: random.Random, undisturbed: Mapping[tuple[str, bool], list[Log]]) -> "Trial":
        """A random one; moments are uniform within the median duration of the phase."""
        mesh = draw.choice(sorted({mesh for mesh, _ in undisturbed}))
        victim, phase = draw.randrange(MESHES[mesh]), draw.choice(PHASES)
        resumed = phase == "resume" or draw.random() < 0.25
        seconds = undisturbed[mesh, resumed][victim].seconds[phase]
        moment = Moment(phase, draw.randint(1, len(seconds)), draw.random() * statistics.median(seconds))
        return cls(mesh, victim, moment, resumed)


@define
class Found:
    """What a trial found.

    Args:
        phase: in which the rank was killed; the drawn phase may have ended a little earlier.
        faults: what was wrong.
        named_s: seconds from the end of the killed rank to that of the last other one.
        lost: steps that had been computed and were computed again.
    """

    phase: str = "none"
    faults: list[str] = Factory(list)
    named_s: float = 0.0
    lost: int = 0


def run_trial(trial: Trial, folder: Path, undisturbed: list[Log]) -> Found:
    """Run a trial in an empty folder; ``undisturbed`` has the job's logs without a kill."""
    found = Found()
    if trial.resumed:
        copy_checkpoint(trial.mesh, folder)
    statuses, times = run_job(trial.mesh, folder, trial.victim, trial.moment)
    killed = folder / "killed"
    if not killed.exists():
        if list(statuses.values()) != [0] * MESHES[trial.mesh]:
            found.faults.append(f"nothing was killed: {statuses}, {errors(folder)}")
        return found  # the job had ended before the moment
    found.phase = killed.read_text(encoding="utf-8")
    before = logs(trial.mesh, folder)
    for rank in range(MESHES[trial.mesh]):
        error = (folder / f"{rank}.err").read_text(encoding="utf-8")
        fault = fault_of(rank, trial.victim, statuses.get(rank), error, bool(before[rank].seconds))
        if fault:
            found.faults.append(fault)
    if times.keys() == statuses.keys() and trial.victim in times:
        found.named_s = max(times.values()) - times[trial.victim]
    remove_logs(folder)
    statuses, _ = run_job(trial.mesh, folder)
    if any(statuses.get(rank) != 0 for rank in range(MESHES[trial.mesh])):
        found.faults.append(f"the restart ended with {statuses}: {errors(folder)}")
        return found
    after = logs(trial.mesh, folder)
    saved = max([log.saved for log in before] + [STEPS // 2 if trial.resumed else 0])
    found.lost = max(
        0, max([step for log in before for step in log.losses] + [log.begins for log in before]) - after[0].begins
    )
    for rank, (log, first, whole) in enumerate(zip(after, before, undisturbed, strict=True)):
        if log.begins < saved or log.begins != after[0].begins:
            found.faults.append(f"rank {rank} began again with step {log.begins}; the last checkpoint was of {saved}")
        missing = [step for step in range(log.begins + 1, STEPS + 1) if step not in log.losses]
        other = [step for one in (first, log) for step, loss in one.losses.items() if whole.losses[step] != loss]
        if missing or other:
            found.faults.append(f"rank {rank}: no loss of the steps {missing}, another one of the steps {other}")
        if log.end is None or whole.end is None:
            found.faults.append(f"rank {rank} did not record its last parameters")
            continue
        others = [name for name in {**whole.end, **log.end} if log.end.get(name) != whole.end.get(name)]
        if others:
            found.faults.append(f"rank {rank} ended with other values of {', '.join(others)}")
    return found


def fault_of(rank: int, victim: int, status: int | None, error: str, complete: bool) -> str:
    """What is wrong with the end of a rank; empty if nothing is."""
    if status is None:
        return f"rank {rank} hangs: {error[-500:]!r}"
    if rank == victim:
        return "" if status == -signal.SIGKILL else f"the killed rank {rank} ended with {status}"
    if complete and status == 0 and not error:
        return ""  # it had done all of its work, and closed its pipeline
    lines = error.splitlines()
    named = len(lines) == 1 and (f"rank {victim} stopped" in error or f"rank {victim} of " in error
                                 or f"rank {victim} did not arrive" in error)  # fmt: skip
    return "" if status == 1 and named else f"rank {rank} ended with {status} and {len(lines)} lines: {error[:500]!r}"


def errors(folder: Path) -> dict[str, str]:
    """The end of what each rank wrote to standard error."""
    return {path.stem: path.read_text(encoding="utf-8")[-500:] for path in sorted(folder.glob("*.err"))}


def copy_checkpoint(mesh: str, folder: Path) -> None:
    """Copy a checkpoint of the undisturbed job."""
    name = f"step-{STEPS // 2}"
    shutil.copytree(folder.parent / mesh / name, folder / name)


def run_undisturbed(parent: Path) -> dict[tuple[str, bool], list[Log]]:
    """Each mesh without a kill, from the beginning and from a checkpoint."""
    found = {}
    for mesh, ranks in MESHES.items():
        for resumed in (False, True):
            folder = parent / (f"{mesh} resumed" if resumed else mesh)
            folder.mkdir()
            if resumed:
                copy_checkpoint(mesh, folder)
            for again in range(1 if resumed else 2):  # the first one plans
                for path in folder.glob("step-*") if again else ():
                    shutil.rmtree(path)
                remove_logs(folder)
                statuses, _ = run_job(mesh, folder)
                if list(statuses.values()) != [0] * ranks:
                    raise SystemExit(f"{mesh} does not run: {statuses}, {errors(folder)}")
            found[mesh, resumed] = logs(mesh, folder)
        if any(one.end != two.end for one, two in zip(found[mesh, False], found[mesh, True], strict=True)):
            raise SystemExit(f"{mesh} ends with other parameters when it is resumed")
    return found


def table(found: Sequence[tuple[Trial, Found]]) -> list[tuple[str, ...]]:
    """A row for each phase."""
    rows = []
    for phase in (*PHASES, "all"):
        of = [each for trial, each in found if phase in (trial.moment.phase, "all")]
        if of:
            times = [each.named_s for each in of]
            faults, lost = sum(bool(each.faults) for each in of), max(each.lost for each in of)
            median, most = statistics.median(times), max(times)
            rows.append((phase, str(len(of)), str(faults), f"{median:.2f}, {most:.2f}", str(lost)))
    return rows


def kill_often(kills: int, seed: int, seconds: float, record: str | None) -> bool:
    """Run the trials, and print them; whether none had a fault."""
    parent, draw, begun = Path(tempfile.mkdtemp()), random.Random(seed), time.monotonic()
    undisturbed = run_undisturbed(parent)
    print(f"undisturbed: {time.monotonic() - begun:.0f} s", flush=True)
    every: list[tuple[Trial, Found]] = []
    while len(every) < kills and time.monotonic() - begun < seconds:
        trial = Trial.drawn(draw, undisturbed)
        folder = Path(tempfile.mkdtemp(dir=parent))
        found = run_trial(trial, folder, undisturbed[trial.mesh, False])
        if found.phase != "none" or found.faults:
            every.append((trial, found))
            print(f"{len(every)}: {trial}\n  {found}", flush=True)
        if found.faults:
            print(f"  kept: '{folder}'")
        else:
            shutil.rmtree(folder)
    right = not any(found.faults for _, found in every)
    if right:
        shutil.rmtree(parent)
    meshes, hosts = dict(Counter(trial.mesh for trial, _ in every)), sum(trial.victim == 0 for trial, _ in every)
    title = f"{len(every)} kills, seed {seed}: {time.monotonic() - begun:.0f} s, meshes {meshes}, rank 0 {hosts} times"
    header = ("killed in", "kills", "faults", "seconds until all had ended: median, most", "steps computed again: most")
    report(record, title, header, table(every))
    return right


def main() -> None:
    """Kill ranks, and print the results."""
    parser = argument_parser(__doc__, seed=0, seconds=(float("inf"), "start no further trial after this time"))
    parser.add_argument("kills", type=int, nargs="?", default=200)
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("PANPIPE_TIMEOUT_S", "30")
    for name in IMPORTED:
        importlib.import_module(name)
    sys.exit(not kill_often(given.kills, given.seed, given.seconds, given.record))


if __name__ == "__main__":
    main()
