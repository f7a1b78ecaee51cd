"""Buckets of which each replica sums a part, by hand: slices of parameters, memory order, sums and gathers."""

import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.runtimes.optimizer.sharing.sharded_buckets import ShardedBucket, Sharing, in_memory_order
from torch import nn


def bucket(replica, count=2, **parameters):
    given = parameters or {"w": nn.Parameter(torch.arange(4.0).view(2, 2)), "b": nn.Parameter(torch.tensor([9.0]))}
    return ShardedBucket(given, Sharing(lambda: None, replica, count))


def parts(found):
    return [(part.name, part.start, part.stop, part.value.tolist()) for part in found.parts]


def test_replicas_have_equal_parts_of_all_elements():
    # Five elements over two replicas: three each, one of which is padding.
    assert parts(bucket(0)) == [("w", 0, 3, [0, 1, 2])]
    assert parts(bucket(1)) == [("w", 3, 4, [3]), ("b", 0, 1, [9])]
    assert (bucket(0).own, bucket(1).own) == (slice(0, 3), slice(3, 6))
    assert bucket(1).memory.numel() == 6
    assert bucket(1).memory[5] == 0
    assert bucket(0).offsets == {"w": 0, "b": 4}


def test_slice_is_a_view_of_the_parameter_and_of_the_bucket():
    found = bucket(1)
    first, _ = found.parts
    first.value.data.fill_(7)
    assert found.parameters["w"].tolist() == [[0, 1], [2, 7]]
    first.gradient.fill_(5)
    assert found.gradients[found.parameters["w"]].tolist()[1][1] == 5


def test_slice_follows_a_parameter_that_was_given_other_memory():
    found = bucket(0)
    found.parameters["w"].data = torch.full((2, 2), 4.0)
    (part,) = found.parts
    assert part.value.tolist() == [0, 1, 2]
    part.follow()
    assert part.value.tolist() == [4, 4, 4]


class Transport:
    """The other replica has the same numbers."""

    def __init__(self):
        self.seen = []

    def reduce_scatter(self, memory):
        self.seen.append(memory.clone())

    all_gather = reduce_scatter


def test_part_of_the_whole_tensor_is_summed():
    found, transport = bucket(0), Transport()
    found.memory.copy_(torch.arange(6.0))
    found.reduce(transport, found.memory)
    assert transport.seen[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert found.part.tolist() == [0, 1, 2]


def test_gathered_parameters_are_copied_to_the_model():
    found, transport = bucket(1), Transport()
    found.gather(transport, found.memory)
    assert transport.seen[0][3:5].tolist() == [3, 9]
    found.memory.copy_(torch.arange(10.0, 16.0))
    found.assign(found.memory)
    assert found.parameters["w"].tolist() == [[10, 11], [12, 13]]
    assert found.parameters["b"].tolist() == [14]


def test_shared_gradients_are_in_a_slot_and_the_part_apart():
    given = {"w": nn.Parameter(torch.arange(4.0).view(2, 2).t()), "b": nn.Parameter(torch.tensor([9.0]))}
    found = ShardedBucket(given, Sharing(lambda: None, 1, 2, gradients=True))
    assert found.memory is None
    assert (found.part.numel(), found.nbytes) == (3, 24)
    memory = found.memory_in(torch.zeros(64, dtype=torch.uint8))
    found.gradient_in(memory, given["w"]).copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert memory.tolist() == [1, 3, 2, 4, 0, 0]  # in the parameter's order of memory
    memory.fill_(7)
    found.clear_padding(memory)
    assert memory.tolist() == [7, 7, 7, 7, 7, 0]
    found.part.copy_(memory[found.own])
    assert [part.gradient.tolist() for part in found.parts] == [[7], [7]]


def test_elements_are_in_the_order_of_memory():
    assert in_memory_order(torch.arange(4.0).view(2, 2).t()).tolist() == [0, 1, 2, 3]
    scalar = bucket(0, 1, s=nn.Parameter(torch.tensor(3.0)))
    assert scalar.parts[0].value.shape == ()


def test_parameter_with_gaps_is_refused():
    gaps = nn.Parameter(torch.zeros(2, 4)[:, ::2])
    with pytest.raises(RequestError, match=r"parameter 'w' has strides \(4, 2\) for shape \(2, 2\): replicas"):
        bucket(0, 2, w=gaps)
