"""The worker process: lines of a job, cancellation, and a process that ends."""

import asyncio
import time
from contextlib import aclosing

import pytest
from panpipe.explore.worker import Worker

from ..support.launch import HANGS_S

QUICK = {"kind": "uniform", "devices": 2, "microbatches": 2, "schedule": "gpipe"}
HOURS = {
    "kind": "uniform", "devices": 16, "microbatches": 64, "schedule": "auto",
    "parameters": {"evaluations": 2_000_000_000},
}  # fmt: skip


async def lines(worker, question):
    return [line async for line in worker.run("answer", question)]


async def cancelled(worker, question, wait_s=0.0):
    """Cancel a job after its first line, or after some seconds."""
    async with aclosing(worker.run("answer", question)) as found:
        if wait_s:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await anext(found)
        else:
            await anext(found)


def run(scenario):
    async def limited():
        worker = Worker()
        try:
            async with asyncio.timeout(HANGS_S):
                return await scenario(worker)
        finally:
            await worker.close()

    return asyncio.run(limited())


def test_cancelled_work_of_hours_ends_soon_and_the_next_job_runs():
    async def scenario(worker):
        first = await lines(worker, QUICK)
        await cancelled(worker, HOURS, wait_s=1.0)
        return first, await lines(worker, QUICK)

    first, second = run(scenario)
    assert first == second  # within the limit of `run`, which is far below the search's time
    assert [next(iter(line)) for line in first] == ["answer", "idle"]


def test_wrong_question_ends_with_an_error_and_the_process_goes_on():
    async def scenario(worker):
        found = await lines(worker, {**QUICK, "schedule": "zb"})
        before = worker._process
        await lines(worker, QUICK)
        return found, before is worker._process

    found, same = run(scenario)
    assert "there is no schedule 'zb'" in found[0]["error"]
    assert same


@pytest.mark.slow
def test_process_that_was_killed_is_reported_and_replaced():
    async def scenario(worker):
        await lines(worker, QUICK)
        asyncio.get_running_loop().call_later(0.3, worker._process.kill)
        found = await lines(worker, HOURS)
        return found, await lines(worker, QUICK)

    found, after = run(scenario)
    assert "has ended, perhaps out of memory" in found[-1]["error"]
    assert "answer" in after[0]


FACTORY = """
import sys, time

def make():
    print("printed by the model", flush=True)
    print("a note", file=sys.stderr, flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_model_that_takes_minutes_is_cancelled_and_cannot_disturb_the_lines(tmp_path, monkeypatch):
    (tmp_path / "slow_factory.py").write_text(FACTORY, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    question = {"kind": "plan", "model": "slow_factory:make", "cluster": "2xH100", "microbatches": 2}

    async def scenario(worker):
        async with aclosing(worker.run("answer", question)) as found:
            async for line in found:
                if line["progress"]["text"] == "a note":
                    break
        start = time.monotonic()
        await lines(worker, QUICK)
        return time.monotonic() - start

    assert run(scenario) < HANGS_S
