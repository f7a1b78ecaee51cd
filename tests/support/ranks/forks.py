"""Processes that begin with everything imported: forks of one process, which imports for all of them once.

What a rank imports takes four to five seconds of a core, which is most of what a test over ranks costs. ``server``
starts that process, and ``serve`` is its loop. A fork ends as a script does, by returning to the interpreter.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen


@frozen
class Fork:
    """A process to start.

    Args:
        arguments: its command line, without the interpreter and the script.
        environment: all of its environment.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str]


class Forks:
    """A process that has imported what ``script`` imports, and forks of it.

    Args:
        script: calls :func:`serve` when it is started with ``serve``.
        environment: of the process that imports.
    """

    def __init__(self, script: Path, environment: Mapping[str, str]) -> None:
        self._script = script
        self._process = subprocess.Popen(
            [sys.executable, str(script), "serve"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip

    def run(self, forks: Sequence[Fork], timeout_s: float) -> list[subprocess.CompletedProcess[str]]:
        """Start all of these at once and wait for them.

        Raises:
            subprocess.TimeoutExpired: one of them did not end; all are killed, and the server with them.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            asked = {
                "folder": os.path.abspath(folder),
                "cwd": os.getcwd(),
                "forks": [[list(fork.arguments), dict(fork.environment)] for fork in forks],
            }
            self._process.stdin.write(json.dumps(asked).encode() + b"\n")
            self._process.stdin.flush()
            ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
            if not ready:
                self.stop()
                errors = (Path(folder, f"{n}.err") for n in range(len(forks)))
                said = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in errors)
                raise subprocess.TimeoutExpired(list(forks[0].arguments), timeout_s, None, said.encode())
            codes = json.loads(self._process.stdout.readline() or "null")
            assert codes is not None, f"the process that forks ranks of {self._script} ended"
            return [
                subprocess.CompletedProcess(
                    [str(self._script), *fork.arguments],
                    code,
                    *(Path(folder, f"{n}.{what}").read_text(encoding="utf-8") for what in ("out", "err")),
                )
                for n, (fork, code) in enumerate(zip(forks, codes, strict=True))
            ]

    def stop(self) -> None:
        """End it and its forks."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    @property
    def ended(self) -> bool:
        """Whether it can fork no longer."""
        return self._process.poll() is not None


def serve(
    main: Callable[[], Any], prepare: Callable[[Sequence[str], Mapping[str, str]], Any]
) -> Callable[[], Any] | None:
    """Fork as asked on standard input, until that ends.

    Args:
        main: what a fork does.
        prepare: called with command line and environment of the first fork, before any: what it computes all of them
            have.

    Returns:
        In a fork, what it is to do: ``main``, with its arguments in ``sys.argv``. None in this process, at the end.
    """
    while line := sys.stdin.buffer.readline():
        asked = json.loads(line)
        prepare(*asked["forks"][0])
        children = list[int]()
        for number, (arguments, environment) in enumerate(asked["forks"]):
            child = os.fork()
            if child == 0:
                _become(asked, number, arguments, environment)
                return main
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        os.write(1, json.dumps(codes).encode() + b"\n")
    return None


def _become(asked: dict[str, Any], number: int, arguments: list[str], environment: dict[str, str]) -> None:
    """Make this fork the process that was asked for."""
    try:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(asked["cwd"])
        sys.argv[1:] = arguments
        files = (os.devnull, os.O_RDONLY), *((f"{asked['folder']}/{number}.{what}", os.O_WRONLY | os.O_CREAT)
                                             for what in ("out", "err"))  # fmt: skip
        for target, (path, flags) in enumerate(files):
            opened = os.open(path, flags, 0o600)
            os.dup2(opened, target)
            os.close(opened)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
