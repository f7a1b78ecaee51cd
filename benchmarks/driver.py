"""What benchmarks share: arguments, times, tables and records, ranks, resident memory, other load, trees."""

import argparse
import datetime
import json
import multiprocessing
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from attrs import frozen
from panpipe.answers.output import print_table
from panpipe.runtimes.devices.available_memory import machine

ROOT = Path(__file__).resolve().parents[1]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that a benchmark starts


def argument_parser(doc: str | None, **options: Any) -> argparse.ArgumentParser:
    """A parser of a script's arguments whose help is the script's docstring; it has ``--record FILE``.

    Args:
        doc: the script's docstring.
        options: name → default value, whose type is the option's, or (default value, help). The default of a switch is
            False.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", metavar="FILE", help="append the tables to this Markdown file")
    for name, given in options.items():
        default, text = given if isinstance(given, tuple) else (given, None)
        if default is False:
            parser.add_argument(f"--{name}", action="store_true", help=text)
        else:
            parser.add_argument(f"--{name}", type=type(default), default=default, help=text)
    return parser


def commit() -> str:
    """The commit that is checked out."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def report(path: str | None, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, and append it to a file of results with date, machine, load and commit.

    Args:
        path: of the Markdown file, of ``--record``; None to print alone. A new file begins with the title as the
            sentence that says what it shows.
        title: above the table.
        header: names of its columns.
        rows: its cells.
    """
    print_table(title, header, rows)
    if path is None:
        return
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    now = f"{datetime.date.today().isoformat()} · {machine()}, load {os.getloadavg()[0]:.1f} · {commit()}"
    lines = [] if target.exists() else [f"{title}. Recorded with {commit()}.", ""]
    lines += [f"## {title}", "", now, "", f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    with target.open("a", encoding="utf-8") as file:
        file.write("\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows), "", ""]))


def seconds(
    work: Callable[[], object],
    rounds: int,
    meet: Callable[[], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Seconds of each of some calls.

    Args:
        work: what is timed.
        rounds: how often.
        meet: called before and after each, such as a barrier of ranks.
        clock: such as ``time.process_time``, which is independent of other processes.
    """
    found = []
    for _ in range(rounds):
        if meet is not None:
            meet()
        start = clock()
        work()
        if meet is not None:
            meet()
        found.append(clock() - start)
    return found


def free_port() -> int:
    """A port of this host that nothing listens to."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def rank_environment(rank: int, port: int, size: int = 2) -> dict[str, str]:
    """The variables that torchrun sets for a rank of one host."""
    return {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }  # fmt: skip


class Workers:
    """Processes of one thread each that answer requests; several are ranks of gloo.

    Args:
        count: how many.
        make: ``make(rank, *given)`` returns, in each process, the function that answers a request.
        given: its further arguments.
    """

    def __init__(self, count: int, make: Callable[..., Callable[[Any], Any]], *given: Any) -> None:
        context, port = multiprocessing.get_context("spawn"), free_port()
        self._wires, self._processes = [], []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_answer, args=(rank, count, port, theirs, make, given), daemon=True)
            process.start()
            self._wires.append(ours)
            self._processes.append(process)
        self._answers()

    def _answers(self) -> list[Any]:
        for wire, process in zip(self._wires, self._processes, strict=True):
            while not wire.poll(1):
                if not process.is_alive():
                    raise SystemExit(f"a process of {process.name} has died")
        return [wire.recv() for wire in self._wires]

    def ask(self, request: Any) -> list[Any]:
        """The answer of each process."""
        for wire in self._wires:
            wire.send(request)
        return self._answers()

    def close(self) -> None:
        """End the processes, without what their pipelines do at an exit."""
        for wire, process in zip(self._wires, self._processes, strict=True):
            wire.send(None)
            process.join()


def _answer(rank: int, count: int, port: int, wire: Any, make: Callable[..., Any], given: Sequence[Any]) -> None:
    import torch

    torch.set_num_threads(1)
    if count > 1:
        os.environ.update(rank_environment(rank, port, count))
        torch.distributed.init_process_group("gloo")
    answer = make(rank, *given)
    wire.send("ready")
    while (request := wire.recv()) is not None:
        wire.send(answer(request))
    os._exit(0)


def resident_bytes(field: str) -> int:
    """``VmRSS``, or ``VmHWM`` for its peak, of this process in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def reset_resident_peak() -> None:
    """Make ``VmHWM`` count from now on."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


_COMPUTE = """
import torch
torch.set_num_threads(1)
matrix = torch.randn(256, 256)
while True:
    torch.mm(matrix, matrix)
"""


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """A context in which this many other processes compute all the time."""
    others = [subprocess.Popen([sys.executable, "-c", _COMPUTE]) for _ in range(processes)]
    try:
        yield
    finally:
        for each in others:
            each.kill()
            each.wait()


@frozen
class Tree:
    """A working tree.

    Args:
        folder: where it is.
        imports: a folder with a link ``panpipe`` to it.
    """

    folder: Path
    imports: Path

    def run(self, *command: str) -> str:
        """Standard output of a command of Python, which imports this tree as ``panpipe``."""
        variables = {**os.environ, "PYTHONPATH": str(self.imports), "PANPIPE_CACHE": "", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, *command], cwd=self.imports, env=variables, capture_output=True, text=True, check=False,
            encoding="utf-8",
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} in {self.folder} failed:\n{done.stderr[-2000:]}")
        return done.stdout

    def script(self, name: str, *arguments: str) -> str:
        """Standard output of a benchmark, whichever folder it is in."""
        found = sorted((self.folder / "benchmarks").rglob(f"{name}.py"))
        if not found:
            raise SystemExit(f"{self.folder} has no benchmark {name}.py")
        return self.run(str(found[0]), *arguments)

    def command(self, *arguments: str) -> tuple[dict[str, float], float]:
        """The answer of ``panpipe … --json``, and the seconds that it took of a core."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        text = self.run("-m", "panpipe", *arguments, "--json")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return json.loads(text), after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@contextmanager
def trees(commit: str, other: str | None = None) -> Iterator[tuple[Tree, Tree]]:
    """A commit's tree, checked out in a temporary folder, and this one, or that of another commit."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, found = Path(name), []
        for number, wanted in enumerate((commit, other)):
            tree = ROOT if wanted is None else stack.enter_context(_checked_out(wanted, folder / f"commit{number}"))
            imports = folder / f"imports{number}"
            imports.mkdir()
            (imports / "panpipe").symlink_to(tree, target_is_directory=True)
            found.append(Tree(tree, imports))
        yield found[0], found[1]


@contextmanager
def _checked_out(commit: str, folder: Path) -> Iterator[Path]:
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(folder), commit], check=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)
