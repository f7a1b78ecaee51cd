"""The worker process for slow jobs: searches, captures of models, simulations. The server may kill it at any time.

One job runs at a time, and streams its lines as JSON. A cancelled one ends at its next report of progress, or with the
process. Model code that prints cannot disturb the lines: its standard output is redirected to standard error.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import redirect_stderr, suppress
from io import TextIOBase
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from ..core.documents import as_plain
from ..core.errors import PanpipeError, in_a_line
from ..core.numba_cache import compile_notice
from .question import Report, parse_question, progress

LOWER_PRIORITY = 10
"""Added to the process's nice value: while a search runs, the server answers a moved slider, and the browser draws."""
GRACE_S = 1.5
"""Seconds that a cancelled job has to end by itself. Then the process is killed; the next job starts another one, which
takes longer, because it loads PyTorch and captures the model again."""


class Cancelled(BaseException):
    """The job was cancelled. Not an ``Exception``: a search that continues after errors must not catch it."""


class Notes(TextIOBase):
    """A standard error whose lines are progress of the job."""

    def __init__(self, report: Report) -> None:
        self._report, self._rest = report, ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in filter(None, map(str.strip, lines)):
            self._report(**progress(line))
        return len(text)


def _work(server: Connection, cancelled: Any) -> None:
    """Run the server's jobs until it ends; those with a number up to ``cancelled`` end at their next line."""
    os.nice(LOWER_PRIORITY)
    os.dup2(2, 1)

    def send(**line: Any) -> None:
        server.send_bytes(json.dumps(line, allow_nan=False).encode())

    while True:
        try:
            number, job, question, what = json.loads(server.recv_bytes())
        except (EOFError, OSError, KeyboardInterrupt):  # the server has ended
            return

        def report(number: int = number, **line: Any) -> None:
            if cancelled.value >= number:
                raise Cancelled
            send(**line)

        last: dict[str, Any] = {}
        with suppress(Cancelled), redirect_stderr(Notes(report)):
            try:
                _run(report, job, question, what)
            except PanpipeError as error:
                last = {"error": str(error)}
            except Exception as error:  # from the user's model, or a defect: the page shows it
                last = {"error": in_a_line(error)}
        send(**last, end=True)


def _run(report: Report, job: str, question: dict[str, Any], what: str) -> None:
    """Run a job, which reports its lines."""
    if "torch" not in sys.modules and question.get("kind") == "plan":
        report(**progress("loading PyTorch"))
    from . import plan_answers, uniform_answers  # here: the process reports that it runs before it imports torch

    asked: Any = parse_question(question)
    module = uniform_answers if asked.kind == "uniform" else plan_answers
    with compile_notice(lambda line: report(**progress(line))):
        if job == "file":
            file = module.file_of(asked, what, report)
            report(file=as_plain(file))
        else:
            {"answer": module.report_answer, "points": module.report_points}[job](asked, report)


class Worker:
    """The server's side: a process that is started with the first job."""

    def __init__(self) -> None:
        self._process: Any = None
        self._free = asyncio.Lock()
        self._count = 0
        self._stopping: asyncio.Task[None] | None = None

    async def run(self, job: str, question: dict[str, Any], what: str = "") -> AsyncGenerator[dict[str, Any], None]:
        """Run a job and yield its lines; closing the iterator cancels it.

        Args:
            job: ``answer``, ``points`` or ``file``.
            what: the kind of file, for the job ``file``.
        """
        async with self._free:
            if self._stopping is not None:
                await asyncio.wait([self._stopping])  # if this wait is cancelled, stopping continues
            self._start()
            self._count += 1
            ended = False
            try:
                self._connection.send_bytes(json.dumps([self._count, job, question, what]).encode())
                while not ended:
                    line = await self._line()
                    ended = line.pop("end", False)
                    if line:
                        yield line
            except (EOFError, OSError):
                ended = True
                yield {"error": "the worker process has ended, perhaps out of memory: try a smaller model or search"}
            finally:
                if not ended:
                    self._stopping = asyncio.create_task(self._stop(self._count))

    async def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()

    def _start(self) -> None:
        if self._process is not None and self._process.is_alive():
            return
        context = get_context("spawn")
        self._connection, other = context.Pipe()
        self._cancelled = context.RawValue("q", 0)  # without a lock: one process writes, one reads
        self._process = context.Process(target=_work, args=(other, self._cancelled), daemon=True)
        self._process.start()
        other.close()

    async def _line(self) -> dict[str, Any]:
        """The next line of the job.

        Raises:
            EOFError, OSError: the process has ended.
        """
        readable, loop, number = asyncio.Event(), asyncio.get_running_loop(), self._connection.fileno()
        loop.add_reader(number, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(number)
        line: dict[str, Any] = json.loads(self._connection.recv_bytes())
        return line

    async def _stop(self, job: int) -> None:
        """Wait until a cancelled job has ended; kill the process if it takes too long."""
        self._cancelled.value = job
        try:
            async with asyncio.timeout(GRACE_S):
                while "end" not in await self._line():
                    pass
        except (TimeoutError, EOFError, OSError):
            await self.close()
