"""Starts ranks that do the jobs of `ranks`, under torchrun or as forks of one process, and reads what they found."""

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .ranks.forks import Fork, Forks

SCRIPT = Path(__file__).parent / "ranks" / "ranks.py"
HANGS_S = 900
"""What takes longer hangs: a machine that is slow or busy takes a tenth of that."""
SHARED = {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
"""What ranks have in their environment whatever the tests have in theirs."""


def torchrun(
    jobs: str, folder: Path, ranks: int = 2, *backend: str, restarts: int = 0, **more: str
) -> subprocess.CompletedProcess[str]:
    """Ranks under torchrun.

    Args:
        jobs: one, or several with commas between: they share the processes, which take seconds to start.
        folder: for what they find.
        ranks: how many.
        backend: the transport; gloo by default.
        restarts: how often torchrun starts them again.
        more: of the environment.
    """
    return torchrun_script(SCRIPT, jobs, str(folder), *backend, ranks=ranks, restarts=restarts, **more)


def torchrun_script(
    script: Path, *arguments: str, ranks: int = 2, restarts: int = 0, **more: str
) -> subprocess.CompletedProcess[str]:
    """Another script under torchrun; the rest as of :func:`torchrun`."""
    options = ("--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts))
    process = _launcher(options, (str(script), *arguments), more)
    out, err = process.communicate(timeout=HANGS_S)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def torchrun_on_nodes(job: str, folder: Path, nodes: int, ranks: int, **more: str) -> list[dict[str, Any]]:
    """What a job found on each rank of several nodes: one torchrun each, all of them on this host."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        meeting = f"127.0.0.1:{taken.getsockname()[1]}"
    options = ("--nnodes", str(nodes), "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d")
    options += ("--rdzv-endpoint", meeting, "--rdzv-id", "panpipe", "--local-addr", "127.0.0.1")
    started = [_launcher(options, (str(SCRIPT), job, str(folder)), more) for _ in range(nodes)]
    for process in started:
        _, err = process.communicate(timeout=HANGS_S)
        assert process.returncode == 0, err[-3000:]
    return [one[job] for one in found(folder, nodes * ranks)]


def _launcher(options: Sequence[str], command: Sequence[str], more: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options, *command],
        env={**os.environ, **SHARED, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )


def found(folder: Path, ranks: int = 2) -> list[dict[str, Any]]:
    """For each rank job → what it found."""
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]


def results_of(jobs: Iterable[str], folder: Path, ranks: int = 2, **more: str) -> dict[str, list[Any]]:
    """What each job found on every rank, all of them in one start, without torchrun."""
    return _by_job(alone(",".join(jobs), folder, ranks, **more), folder, ranks)


def results_under_torchrun(jobs: Iterable[str], folder: Path, ranks: int = 2, **more: str) -> dict[str, list[Any]]:
    """The same of ranks under torchrun."""
    return _by_job([torchrun(",".join(jobs), folder, ranks, **more)], folder, ranks)


def _by_job(done: Iterable[subprocess.CompletedProcess[str]], folder: Path, ranks: int) -> dict[str, list[Any]]:
    for one in done:
        assert one.returncode == 0, one.stderr[-3000:]
    here = found(folder, ranks)
    return {job: [one[job] for one in here] for job in here[0]}


def results(job: str, folder: Path, ranks: int = 2, **more: str) -> list[Any]:
    """What one job found on every rank."""
    return results_of([job], folder, ranks, **more)[job]


def alone(
    job: str,
    folder: Path,
    ranks: int = 2,
    *,
    backend: str | None = None,
    absent: tuple[int, ...] = (),
    **more: str,
) -> list[subprocess.CompletedProcess[str]]:
    """Ranks without an agent, which would stop the remaining ranks, perhaps before they have printed the reason.

    They are forks, unless ``PYTHONPATH`` is given: then they import their own modules. So they do where there is a GPU,
    for whose threads autograd refuses to run in a fork.
    """
    return _ranks([job, str(folder), *([backend] if backend else [])], ranks, absent, more)


def forked_script(script: Path, *arguments: str, ranks: int = 2, **more: str) -> None:
    """Another script on ranks as of `alone`: seconds of a core less than under torchrun.

    Raises:
        AssertionError: one of them failed.
    """
    for one in _ranks([str(script), *arguments], ranks, (), more):
        assert one.returncode == 0, one.stderr[-3000:]


def _ranks(
    arguments: Sequence[str], ranks: int, absent: tuple[int, ...], more: Mapping[str, str]
) -> list[subprocess.CompletedProcess[str]]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    shared = {**SHARED, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    started = [
        Fork(arguments, {**os.environ, **shared, **more, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
        if rank not in absent
    ]
    return _fresh(started) if "PYTHONPATH" in more or torch.cuda.is_available() else _forks().run(started, HANGS_S)


def _fresh(processes: Sequence[Fork]) -> list[subprocess.CompletedProcess[str]]:
    """Processes that import for themselves."""
    started = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), *process.arguments],
            env=dict(process.environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        for process in processes
    ]
    done = []
    for process in started:
        out, err = process.communicate(timeout=HANGS_S)
        done.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    return done


_running: list[Forks] = []


def _forks() -> Forks:
    """The process whose forks are ranks, which lives as long as this one."""
    if not _running or _running[-1].ended:
        _running.append(forks := Forks(SCRIPT, {**os.environ, **SHARED}))
        atexit.register(forks.stop)
    return _running[-1]


def left_over(folder: Path) -> list[int]:
    """Processes that were started with this folder and are still there."""
    here = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            here += [int(path.parent.name)] if os.fsencode(folder) in path.read_bytes() else []
    return here
