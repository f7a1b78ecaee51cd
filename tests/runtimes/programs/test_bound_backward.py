"""Backward programs bound to a stage's tensors, with programs by hand: what they are given, and what is added up."""

import pytest
import torch
from attrs import define
from panpipe.runtimes.programs.bound_backward import BoundBackward, zeros
from torch import nn

CPU = torch.device("cpu")


@define
class Size:
    """Of a boundary tensor."""

    shape: tuple[int, ...] = (2,)
    dtype: torch.dtype = torch.float64


@define
class Inputs:
    """What a stage reads: two boundary tensors, then static ones, then two leaves of the batch and the random key."""

    boundary: tuple[Size, ...] = (Size(), Size((3,)))
    batch: tuple[int, ...] = (5, 1)
    random: bool = True


class Program:
    """Returns what ``make`` returns of what it is given, and remembers that."""

    def __init__(self, make=lambda given, sink: [], **fields):
        self._make = make
        self.saved = self.created = self.inputs = self.tangents = self.gradients = self.parameters = ()
        self.__dict__.update(fields)

    def run(self, given, sink):
        self.given = list(given)
        return self._make(given, sink)


W, FROZEN = nn.Parameter(torch.zeros(2, 2)), torch.full((2,), 9.0)


def bound(program, returned=(), loss=None, parameter=W):
    parameter.grad = None
    static = [parameter, FROZEN]
    buffers = {}

    def buffer(of):
        return buffers.setdefault(id(of), torch.empty_like(of))

    return BoundBackward(program, Inputs(), static, loss, buffer, returned, CPU)


def run(program, saved=(), created=(), tangents=(), release=True, **options):
    saved, created = list(saved), list(created)
    found = bound(program, **options).run(
        saved, created, dict(tangents), torch.tensor(0.25), tuple(f"leaf {i}" for i in range(6)), "key", release
    )
    return found, saved, created


def test_program_is_given_saved_created_fixed_batch_key_and_tangents_in_its_order():
    # Inputs by number: 0 and 1 are the boundary's, 2 and 3 static, 4 and 5 of the batch, 6 the key.
    program = Program(saved=(1, 0), created=(0,), inputs=(3, 5, 2, 6, 4), tangents=(0, 2))
    run(program, ["a", "b"], ["c"], {0: "tangent 0"}, loss=2)
    given = program.given
    assert given[:3] == ["b", "a", "c"]
    assert given[3] is FROZEN
    assert given[5] is W
    assert (given[4], given[6], given[7]) == ("leaf 1", "key", "leaf 5")
    assert (given[8], given[9].item()) == ("tangent 0", 0.25)


@pytest.mark.parametrize("release", [True, False])
def test_saved_tensors_are_released_before_the_program_runs(release):
    seen = []
    program = Program(lambda given, sink: seen.append(list(held)) or [], saved=(0,))
    held = ["a"]
    bound(program).run(held, [], {}, torch.tensor(1.0), (), "key", release)
    assert seen == [[] if release else ["a"]]


def test_messages_are_contiguous_and_zeros_where_nothing_flows_back():
    turned = torch.arange(6.0).view(2, 3).t()
    program = Program(lambda given, sink: [turned, "created for W"], gradients=(1,))
    (messages, rest), _, _ = run(program, returned=([1, 0], []))
    assert messages[1] == []
    assert messages[0][0].is_contiguous()
    assert torch.equal(messages[0][0], turned)
    assert (messages[0][1].tolist(), messages[0][1].dtype) == ([0.0, 0.0], torch.float64)
    assert rest == ["created for W"]


def test_gradients_of_microbatches_are_added_up_in_the_first_ones_memory():
    backward = bound(Program(parameters=(2,)))
    backward.add(0, torch.ones(2, 2))
    memory = W.grad.data_ptr()
    backward.add(0, torch.full((2, 2), 2.0))
    assert (W.grad.tolist(), W.grad.data_ptr()) == ([[3.0] * 2] * 2, memory)


@pytest.mark.parametrize("before", [False, True])
def test_products_are_added_inside_the_product(before):
    backward = bound(Program(parameters=(2,)))
    if before:
        backward.add(0, torch.ones(2, 2))
    left, right = torch.arange(4.0).view(2, 2), torch.eye(2)
    backward.add_product(0, left, right)
    assert torch.equal(W.grad, left + before)


def test_zeros_have_the_boundarys_shape_and_dtype():
    found = zeros(Size((2, 3), torch.float16), CPU)
    assert (tuple(found.shape), found.dtype, found.any().item()) == ((2, 3), torch.float16, False)
