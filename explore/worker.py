"""The worker process for slow jobs: searches, captures of models, simulations. The server may kill it at any time.

It reads jobs from standard input and writes results to standard output, one JSON object a line. Model code that prints
cannot disturb that: its standard output is redirected to standard error. Only one job runs; a cancelled one ends at
its next report of progress, or with the process.
"""

import json
import os
import sys
import threading
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from io import TextIOBase
from typing import IO, Any

from ..core.compile_notice import compile_notice
from ..core.errors import PanpipeError, in_a_line
from .question import Question, Report, parse_question, progress

LOWER_PRIORITY = 10
"""Added to the process's nice value: while a search runs, the server answers a moved slider, and the browser draws."""


class Cancelled(BaseException):
    """The job was cancelled. Not an ``Exception``: a search that continues after errors must not catch it."""


class Output:
    """Writes the lines of a job.

    Args:
        file: the pipe to the server.
    """

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._cancelled: set[int] = set()
        self.job = 0

    def cancel(self, job: int) -> None:
        """Make a job end at its next line."""
        self._cancelled.add(job)

    def write(self, **line: Any) -> None:
        """Write a line of the running job.

        Raises:
            Cancelled: the job was cancelled.
        """
        if self.job in self._cancelled:
            raise Cancelled
        self._file.write(json.dumps({"id": self.job, **line}, allow_nan=False) + "\n")
        self._file.flush()

    def end(self, **line: Any) -> None:
        """Write the last line of a job, cancelled or not."""
        self._file.write(json.dumps({"id": self.job, "end": True, **line}, allow_nan=False) + "\n")
        self._file.flush()


class Notes(TextIOBase):
    """A standard error whose lines are progress of the job."""

    def __init__(self, output: Output) -> None:
        self._output, self._rest = output, ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in filter(None, map(str.strip, lines)):
            self._output.write(**progress(line))
        return len(text)


def run(report: Report, job: str, question: dict[str, Any], what: str) -> None:
    """Run a job, which reports its lines."""
    if "torch" not in sys.modules and question.get("kind") == "plan":
        report(**progress("loading PyTorch"))
    with compile_notice(lambda line: report(**progress(line))):
        _run(report, job, parse_question(question), what)


def _run(report: Report, job: str, asked: Question, what: str) -> None:
    from . import plan_answers, uniform_answers  # here: the process reports that it runs before it imports torch

    module = uniform_answers if asked.kind == "uniform" else plan_answers
    if job == "file":
        file = module.file_of(asked, what, report)
        report(file={"name": file.name, "media_type": file.media_type, "text": file.text})
        return
    jobs: dict[str, Callable[[Any, Report], None]] = {"answer": module.report_answer, "points": module.report_points}
    jobs[job](asked, report)


def main() -> None:
    """Read jobs until standard input ends."""
    os.nice(LOWER_PRIORITY)
    # Output that models print is redirected to standard error; only jobs write to the server's pipe.
    file = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    output, jobs, ready = Output(file), [], threading.Semaphore(0)

    def read() -> None:
        for line in sys.stdin:
            message = json.loads(line)
            if "cancel" in message:
                output.cancel(message["cancel"])
            else:
                jobs.append(message)
                ready.release()
        os._exit(0)  # the server has ended

    threading.Thread(target=read, daemon=True).start()
    while True:
        ready.acquire()
        message = jobs.pop(0)
        output.job = message["id"]
        last: dict[str, Any] = {}
        with suppress(Cancelled), redirect_stderr(Notes(output)):
            try:
                run(output.write, message["job"], message["question"], message.get("what", ""))
            except PanpipeError as error:
                last = {"error": str(error)}
            except Exception as error:  # from the user's model, or a defect: the page shows it
                last = {"error": in_a_line(error)}
        output.end(**last)


if __name__ == "__main__":
    main()
