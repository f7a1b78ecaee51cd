"""The server's side of the worker process: it runs one job at a time, streams its lines, and can cancel it."""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from typing import Any

GRACE_S = 1.5
"""Seconds that a cancelled job has to end by itself. Then the process is killed; the next job starts another one, which
takes longer, because it loads PyTorch and captures the model again."""
LONGEST_LINE = 1 << 30


class Worker:
    """A worker process, started with the first job."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._free = asyncio.Lock()
        self._count = 0
        self._stopping: asyncio.Task[None] | None = None

    async def run(self, job: str, question: dict[str, Any], what: str = "") -> AsyncGenerator[dict[str, Any], None]:
        """Run a job and yield its lines; closing the iterator cancels it.

        Args:
            job: its name in the worker.
            question: the page's question, as plain data.
            what: the kind of file, for the job ``file``.
        """
        async with self._free:
            if self._stopping is not None:
                await asyncio.wait([self._stopping])  # if this wait is cancelled, stopping continues
            process = await self._started()
            self._count += 1
            number, ended = self._count, False
            try:
                self._send({"id": number, "job": job, "question": question, "what": what})
                while not ended:
                    line = await _line(process)
                    if line is None:
                        ended = True
                        problem = "the worker process has ended, perhaps out of memory: try a smaller model or search"
                        yield {"error": problem}
                    elif line.pop("id") == number:
                        ended = bool(line.pop("end", False))
                        if line:
                            yield line
            finally:
                if not ended:
                    self._stopping = asyncio.create_task(self._stop(number, process))

    async def close(self) -> None:
        """End the process."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            pipe = asyncio.subprocess.PIPE
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "panpipe.explore.worker", stdin=pipe, stdout=pipe, limit=LONGEST_LINE
            )
        return self._process

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _stop(self, number: int, process: asyncio.subprocess.Process) -> None:
        """Wait until a cancelled job has ended; kill the process if it takes too long."""
        if process.returncode is not None:
            return
        self._send({"cancel": number})
        try:
            async with asyncio.timeout(GRACE_S):
                while (line := await _line(process)) is not None:
                    if line["id"] == number and "end" in line:
                        return
        except TimeoutError:
            pass
        process.kill()
        await process.wait()


async def _line(process: asyncio.subprocess.Process) -> dict[str, Any] | None:
    assert process.stdout is not None
    text = await process.stdout.readline()
    if not text.endswith(b"\n"):
        await process.wait()
        return None
    line: dict[str, Any] = json.loads(text)
    return line
