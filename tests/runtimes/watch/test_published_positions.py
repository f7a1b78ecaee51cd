"""Positions that ranks publish in the job's store, and read there."""

import pytest
import torch.distributed as dist
from attrs import evolve
from panpipe.runtimes.watch import published_positions as module
from panpipe.runtimes.watch.positions import UNKNOWN, Position
from panpipe.runtimes.watch.published_positions import PublishedPositions

OWN = Position("in step 3 at 0F0", (0,))


@pytest.fixture
def store():
    return dist.HashStore()


def test_position_of_another_rank_is_read_and_one_that_did_not_arrive_is_unknown(store):
    PublishedPositions(1, 3, 60.0).write(store, Position("in step 3 at 1B0", (1,), (0,), 2.5, "train.py:3"), beat=1)
    found = PublishedPositions(0, 3, 60.0).read(store, OWN)
    assert found[0] is OWN
    assert evolve(found[1], silent_s=0.0) == Position("in step 3 at 1B0", (1,), (0,), 2.5, "train.py:3")
    assert evolve(found[2], silent_s=0.0) == UNKNOWN


def test_rank_that_closed_its_pipeline_is_read_with_its_reason(store):
    PublishedPositions(1, 3, 60.0).end(store, " after step 9")
    positions = PublishedPositions(0, 3, 60.0)
    assert positions.left(store, [1, 2, 7]) == {1: " after step 9"}
    assert positions.read(store, OWN)[1].left == " after step 9"
    assert positions.host(store) == UNKNOWN


def test_silence_is_measured_between_reads_of_the_same_document(store, monkeypatch):
    now = [10.0]
    monkeypatch.setattr("panpipe.runtimes.watch.activity.time.monotonic", lambda: now[0])
    other, positions = PublishedPositions(1, 2, 60.0), PublishedPositions(0, 2, 60.0)
    silent = []
    for beat in (1, 1, 2):
        other.write(store, OWN, beat)
        silent.append(positions.read(store, OWN)[1].silent_s)
        now[0] += 1.5
    assert silent == [0.0, 1.5, 0.0]


def test_rank_of_a_small_job_always_reads_and_one_of_a_large_job_after_a_wait(monkeypatch):
    now = [10.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    waits = Position("in step 3", on=(1,), quiet_s=6.0)
    assert PublishedPositions(0, 16, 60.0).reads(OWN)
    large = PublishedPositions(0, 100, 60.0)
    assert [large.reads(OWN), large.reads(Position("", on=(1,), quiet_s=4.0))] == [False, False]
    assert [large.reads(waits), large.reads(waits)] == [True, False]  # one second later again
    now[0] += 1.0
    assert large.reads(waits)
