"""The messages of a stage by hand: who sends and receives what, and in which order gradients are summed."""

import pytest
import torch
from attrs import define
from panpipe.runtimes.optimizer.stage_state import StageState
from panpipe.runtimes.programs.linked_stage import LinkedStage


@define(frozen=True)
class Tensor:
    """What a message needs of a boundary tensor."""

    name: str
    shape: tuple[int, ...] = (2, 3)
    dtype: torch.dtype = torch.float32
    differentiable: bool = True


A, B, C = Tensor("a"), Tensor("b", (4,), torch.int64, False), Tensor("c", (5,))
LAYOUT = {(0, 1): (A, B), (0, 2): (A,), (1, 2): (C,), (1, 3): (C, A)}


class Stage(LinkedStage):
    def forward(self, microbatch, boundary, leaves, key):
        return [], []

    def backward(self, microbatch, tangents, seed, leaves, key):
        return []


def stage(index, boundary, outputs):
    return Stage(index, boundary, outputs, ["loss"], LAYOUT, StageState({}, {}, None), [0])


def test_sources_are_the_first_message_with_each_tensor():
    found = stage(2, [C, A], [])
    assert found.sources == [(1, 0), (0, 0)]
    assert found.senders == (1, 0)
    assert found.outgoing == {}


def test_gradients_go_back_for_differentiable_tensors_alone():
    found = stage(1, [A, B], [C, A])
    assert found.returned == {0: [0]}
    assert found.sources == [(0, 0), (0, 1)]
    assert stage(2, [C, A], []).returned == {0: [1], 1: [0]}


def test_outputs_have_places_in_the_messages_of_their_readers():
    found = stage(1, [A, B], [C, A])
    assert found.outgoing == {2: [0], 3: [0, 1]}


def test_gradients_of_an_output_are_summed_from_its_last_reader_to_its_first():
    found = stage(1, [A, B], [C, A])
    assert found.tangents == {0: [(3, 0), (2, 0)], 1: [(3, 1)]}
    assert found.receivers == (3, 2)


def test_gradients_are_counted_without_the_tensors_that_have_none():
    found = stage(0, [], [A, B])
    assert found.tangents == {0: [(2, 0), (1, 0)]}
    assert found.message(False, 1) == [((2, 3), torch.float32)]
    assert stage(1, [A, B], [C, A]).message(True, 0) == [((2, 3), torch.float32), ((4,), torch.int64)]


def test_stage_without_saved_tensors_of_its_own_holds_none():
    found = stage(0, [], [A, B])
    assert (found.held(0), found.shared_bytes, found.persistent, tuple(found.offloaded)) == ([], 0, set(), ())


def test_tensor_that_no_message_has_is_an_error():
    with pytest.raises(StopIteration):
        stage(3, [B], [])
