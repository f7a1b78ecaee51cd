"""The end of reductions over replicas that a frame records."""

from typing import Any

import pytest
import torch
from attrs import define
from panpipe.core.actions import Action, Kind
from panpipe.runtimes.engine.frame import Frame
from panpipe.runtimes.optimizer.gradient_buckets import Reduction, buckets_of
from torch import nn


@define
class Silent:
    """A sum that has ended and does not report when."""

    def wait(self) -> None:
        pass


@define
class Reporting(Silent):
    """One that reports its end, once it is watched."""

    at: int
    ended_ns: int | None = None

    def watch(self) -> None:
        self.ended_ns = self.at


class Replicas:
    def __init__(self, handles: list[Any]) -> None:
        self.handles = handles

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        return self.handles.pop(0)


class Clock:
    def mark(self) -> int:
        return 99


@pytest.mark.parametrize(
    ("handles", "watched", "end"),
    [
        ([Reporting(17), Reporting(12)], True, 17),  # the end of the last bucket
        ([Reporting(17), Reporting(12)], False, 99),
        ([Reporting(17), Silent()], True, 99),  # the time of the wait
    ],
)
def test_frame_records_the_end_of_a_reduction_that_the_transport_reports(handles, watched, end):
    parameters = [nn.Parameter(torch.zeros(4)) for _ in handles]
    replicas = Replicas(list(handles))
    reduction = Reduction([(bucket, replicas) for bucket in buckets_of(parameters, size=16)])
    if watched:
        reduction.watch()
    frame = Frame(None, None, Clock(), None, traced=True, pending={Action(3, Kind.REDUCE_GRAD): reduction})
    frame.wait_pending()
    assert frame.arrivals == {Action(3, Kind.REDUCE_GRAD): end}
    assert not frame.pending
