"""Counts processes that end wrongly: two ranks train a small model and end in each of several ways, many times.

A rank that leaves threads or process groups to the interpreter's end can abort there, after all of its work, and some
of the time only. So exits are counted, on a quiet machine and under load::

    python benchmarks/failures/exits.py [EXITS] [--load PROCESSES] [--torchrun [--jobs JOBS]]

Ranks are forked from a process that has imported everything, which takes most of their time, and end as any script
does: by returning to the interpreter, which then ends. With ``--torchrun`` they are forked from the workers of one
torchrun, in its environment and over its store, each as a further attempt; ``--jobs`` more are started by a torchrun of
their own, without a fork.
"""

import argparse
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import panpipe
import torch
from torch import nn

RANKS = 2
IMPORTED = ("torch._dynamo", "torch.export", "torch.distributed.device_mesh", "panpipe.api", "numba")


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The training step."""
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def model() -> nn.Module:
    """The model, equal on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def train(ending: str, file: Path) -> None:
    """What a rank does, without closing anything, until it ends in that way."""
    batch = {"x": torch.ones(4, 8), "y": torch.zeros(4, 4)}

    def trained() -> panpipe.Pipeline:
        plan = file if file.exists() else "auto"
        pipe = panpipe.pipeline(model(), step, batch, optimizer=torch.optim.SGD, microbatches=2, plan=plan)
        pipe.step(batch)
        pipe.evaluate(batch)
        return pipe

    if ending == "compiled":
        step(torch.compile(model(), backend="panpipe"), batch).backward()
        return
    if ending == "group":
        torch.distributed.init_process_group("gloo")
    LEFT_OPEN.append(pipe := trained())
    if ending == "plan" and os.environ["RANK"] == "0":
        written = file.with_suffix(".part")
        written.write_text(panpipe.plan_json(pipe.plan), encoding="utf-8")
        written.rename(file)
    if ending == "several":
        LEFT_OPEN.extend([trained(), trained()])
    if ending == "with":
        with trained() as other:
            other.step(batch)
    if ending == "exit":
        sys.exit(0)
    if ending == "raise":
        raise ValueError("an error of the user's own")


LEFT_OPEN: list[panpipe.Pipeline] = []
ENDINGS = {"end": 0, "exit": 0, "several": 0, "group": 0, "with": 0, "raise": 1, "compiled": 0}
"""Each way to end, and the exit status that a process ends with then."""


class Job:
    """One job of ranks, each a fork of this process.

    Args:
        ending: how they end.
        folder: for the plan, and for what they write to standard error.
    """

    def __init__(self, ending: str, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        self._ending, self._folder = ending, folder
        self._job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
        self._children: list[int] = []

    def start(self) -> Callable[[], None] | None:
        """In a child the function to run; None in this process, when all are started."""
        alone = self._ending == "compiled"
        for rank in range(1 if alone else RANKS):
            child = os.fork()
            if child == 0:
                if not alone:
                    os.environ.update(self._job, RANK=str(rank), LOCAL_RANK=str(rank))
                error = os.open(self._folder / str(rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(error, 2)
                return lambda: train(self._ending, self._folder / "plan.json")
            self._children.append(child)
        return None

    def ended(self) -> list[tuple[int, str]]:
        """Exit status and standard error of each."""
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in self._children]
        return [(code, (self._folder / str(rank)).read_text()) for rank, code in enumerate(codes)]


def counted(exits: int, folder: Path) -> tuple[Counter[str], list[str]] | Callable[[], None]:
    """Processes that ended, by the intended way, and one line for each that ended wrongly; in a child the function to
    run.

    Args:
        exits: how many processes at least.
        folder: for their files.
    """
    ended, wrong = Counter[str](), list[str]()
    endings = ["plan"]
    while ended.total() < exits or endings:
        endings = endings or list(ENDINGS)
        ending = endings.pop(0)
        job = Job(ending, folder)
        if (work := job.start()) is not None:
            return work
        for status, error in job.ended():
            ended[ending] += 1
            if status != ENDINGS.get(ending, 0) or "terminate called" in error:
                wrong.append(f"{ending}: status {status}: {error.strip()[-300:]!r}")
    return ended, wrong


def worker(exits: int, folder: Path) -> Callable[[], None] | None:
    """What a worker of torchrun does: fork this rank of one job after another, and record how each ended.

    Args:
        exits: how many; 0 to be the rank itself, of one job.
        folder: for the plan, and for the records.

    Returns:
        In a child the function to run; None in the worker, after all jobs.
    """
    rank, plan = os.environ["RANK"], folder / "plan.json"
    if not exits:
        return lambda: train("end", plan)
    # A group of the user's own would find the addresses of the attempt before in torchrun's store.
    endings = [ending for ending in ENDINGS if ending not in ("compiled", "group")]
    for attempt in range(exits):
        ending = "plan" if attempt == 0 else endings[attempt % len(endings)]
        error = folder / f"{rank}.{attempt}.err"
        child = os.fork()
        if child == 0:
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)  # torch and panpipe keep the attempts' keys apart
            os.dup2(os.open(error, os.O_WRONLY | os.O_CREAT), 2)
            return lambda: train(ending, plan)
        found = (ending, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), error.read_text(encoding="utf-8"))
        with (folder / f"{rank}.jsonl").open("a", encoding="utf-8") as file:
            print(json.dumps(found), file=file)
        while not plan.exists():
            time.sleep(0.01)  # rank 0 writes it in its first attempt: all ranks of the next one read it
    return None


def counted_under_torchrun(exits: int, jobs: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """The same as of `counted`, of ranks that torchrun started.

    Args:
        exits: how many processes that are forked by its workers.
        jobs: how many torchruns whose workers are the ranks.
        folder: for their files.
    """
    ended, wrong = Counter[str](), list[str]()
    for job in range(1 + jobs):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        command += [__file__, str(0 if job else -(-exits // RANKS)), "--worker", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, encoding="utf-8")
        if job:
            ended["torchrun alone"] += RANKS
        if done.returncode != 0 or "terminate called" in done.stderr:
            wrong.append(f"torchrun {job}: status {done.returncode}: {done.stderr.strip()[-300:]!r}")
    for path in folder.glob("*.jsonl"):
        for ending, status, error in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            ended[ending] += 1
            if status != ENDINGS.get(ending, 0) or "terminate called" in error:
                wrong.append(f"{ending}: status {status}: {error.strip()[-300:]!r}")
    return ended, wrong


def main() -> None:
    """Count exits, and print what they were."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("exits", type=int, nargs="?", default=200)
    parser.add_argument("--load", type=int, default=0, help="processes that keep the processors busy meanwhile")
    parser.add_argument("--torchrun", action="store_true", help="ranks that torchrun starts")
    parser.add_argument("--jobs", type=int, default=0, help="torchruns whose workers are the ranks themselves")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if not given.torchrun:
        for name in IMPORTED:
            importlib.import_module(name)
    if given.worker is not None:
        work = worker(given.exits, given.worker)
        if work is not None:
            work()
        return
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(given.load)]
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp())
    parent = os.getpid()
    try:
        if given.torchrun:
            found = counted_under_torchrun(given.exits, given.jobs, folder)
        else:
            found = counted(given.exits, folder)
    finally:
        for process in busy if os.getpid() == parent else ():
            process.send_signal(signal.SIGKILL)
    if not isinstance(found, tuple):
        found()  # a child: it ends as a script does
        return
    shutil.rmtree(folder)
    ended, wrong = found
    print(f"{len(wrong)} of {ended.total()} exits failed, with {given.load} busy processes: {dict(ended)}")
    print(f"{time.monotonic() - started:.0f} s")
    print("\n".join(wrong))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
