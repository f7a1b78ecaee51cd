"""What a step's frame knows of reductions over replicas."""

from typing import Any

import pytest
import torch
from attrs import define
from panpipe.core.actions import Action, Kind
from panpipe.runtimes.engine.frame import Frame
from panpipe.runtimes.optimizer.buckets import Reduction, buckets_of
from torch import nn


@define
class Silent:
    """A sum that is over and does not tell when it was."""

    def wait(self) -> None:
        pass


@define
class Telling(Silent):
    """One that tells, once it is watched."""

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
        ([Telling(17), Telling(12)], True, 17),  # when the last of its buckets was
        ([Telling(17), Telling(12)], False, 99),
        ([Telling(17), Silent()], True, 99),  # when it was waited for
    ],
)
def test_a_reduction_ends_when_it_was_over_where_the_transport_tells(handles, watched, end):
    parameters = [nn.Parameter(torch.zeros(4)) for _ in handles]
    reduction = Reduction(buckets_of(parameters, size=16), Replicas(list(handles)))
    if watched:
        reduction.watch()
    frame = Frame(None, None, Clock(), None, traced=True, pending={Action(3, Kind.REDUCE_GRAD): reduction})
    frame.settle()
    assert frame.arrivals == {Action(3, Kind.REDUCE_GRAD): end}
    assert not frame.pending
