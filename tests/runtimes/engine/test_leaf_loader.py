"""Copies of a batch's leaves to a device: each tensor once, a few microbatches ahead."""

from typing import Any

import torch
from attrs import define, field
from panpipe.runtimes.engine.leaf_loader import AHEAD, LeafLoader


@define
class Piece:
    leaves: tuple[Any, ...]


@define
class Queue:
    """A queue that records loads, and after which of them it continues."""

    loads: list[list[Any]] = field(factory=list)
    awaited: list[int] = field(factory=list)

    def load(self, values):
        self.loads.append(list(values))
        return [f"copy of {value}" for value in values], len(self.loads) - 1

    def loaded(self, ticket):
        self.awaited.append(ticket)


def test_microbatches_are_copied_a_few_ahead_of_their_readers():
    queue = Queue()
    loader = LeafLoader(queue, [Piece((f"x{m}", f"y{m}")) for m in range(6)], [[0]] * 6)
    assert queue.loads == []
    assert loader.of(0) == ("copy of x0", None)
    assert len(queue.loads) == 1 + AHEAD
    assert queue.awaited == [0]
    loader.of(0)
    assert (len(queue.loads), queue.awaited) == (1 + AHEAD, [0])
    assert loader.of(2)[0] == "copy of x2"
    assert (len(queue.loads), queue.awaited) == (3 + AHEAD, [0, 1, 2])
    assert loader.of(5)[0] == "copy of x5"
    assert len(queue.loads) == 6
    assert loader.of(1)[0] == "copy of x1"
    assert queue.awaited == [0, 1, 2, 3, 4, 5]


def test_a_tensor_of_all_microbatches_is_copied_once():
    queue, shared = Queue(), torch.zeros(2)
    loader = LeafLoader(queue, [Piece((shared, f"x{m}")) for m in range(3)], [[0, 1]] * 3)
    assert [loader.of(m)[1] for m in range(3)] == ["copy of x0", "copy of x1", "copy of x2"]
    assert sum(value is shared for values in queue.loads for value in values) == 1
