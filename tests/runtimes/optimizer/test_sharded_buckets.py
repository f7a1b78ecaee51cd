"""Buckets of which each replica sums a part, by hand: slices of parameters, memory order, sums and gathers."""

import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.runtimes.optimizer.sharded_buckets import ShardedBucket, Sharing, in_memory_order
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


def test_missing_gradient_counts_as_zeros_in_the_sum():
    found, transport = bucket(0), Transport()
    found.parameters["w"].grad = torch.ones(2, 2)
    found.gradients[found.parameters["b"]].fill_(99)
    found.reduce(transport)
    assert transport.seen[0].tolist() == [1, 1, 1, 1, 0, 0]


def test_gathered_parameters_are_copied_to_the_model():
    found, transport = bucket(1), Transport()
    found.gather(transport)
    assert transport.seen[0][3:5].tolist() == [3, 9]
    found.memory.copy_(torch.arange(10.0, 16.0))
    found.assign()
    assert found.parameters["w"].tolist() == [[10, 11], [12, 13]]
    assert found.parameters["b"].tolist() == [14]


def test_elements_are_in_the_order_of_memory():
    assert in_memory_order(torch.arange(4.0).view(2, 2).t()).tolist() == [0, 1, 2, 3]
    scalar = bucket(0, 1, s=nn.Parameter(torch.tensor(3.0)))
    assert scalar.parts[0].value.shape == ()


def test_parameter_with_gaps_is_refused():
    gaps = nn.Parameter(torch.zeros(2, 4)[:, ::2])
    with pytest.raises(RequestError, match=r"parameter 'w' has strides \(4, 2\) for shape \(2, 2\): replicas"):
        bucket(0, 2, w=gaps)
