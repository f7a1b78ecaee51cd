"""Sums of gradients to the parts of replicas, and parameters back to all, over the transport of one process."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from panpipe.backends.memcpy import connect
from panpipe.runtimes.optimizer.sharing.shard_transfers import Gather, ShardedReduction
from panpipe.runtimes.optimizer.sharing.sharded_buckets import Sharing
from panpipe.runtimes.optimizer.sharing.shards import Shards
from torch import nn

SHAPES = {"a": (3,), "b": (2, 2), "never": (2,)}


def on_each(count, work):
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, connect(count)))


def shards_of(end, count):
    named = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    return named, Shards(named, Sharing(lambda: end, end.device, count, frozenset()))


def with_gradients(named, shards, device, names=("a", "b")):
    for name in names:
        buffer = shards.gradients[named[name]]
        named[name].grad = buffer.fill_(device + 1.0)


@pytest.mark.parametrize("count", [2, 3])
def test_slices_have_the_sums_and_parameters_no_gradient(count):
    def work(end):
        named, shards = shards_of(end, count)
        with_gradients(named, shards, end.device)
        reduction = ShardedReduction(shards, end)
        reduction.watch()
        reduction.wait()
        assert end._addends._free == []  # what sums received is freed with the last
        assert all(p.grad is None for p in named.values())
        size = sum(bucket.nbytes for bucket in shards.buckets)
        assert reduction.bytes == size >= 9 * 4
        return {name: part.value.grad for name, part in shards.parts.items()}, {
            name: part.value.numel() for name, part in shards.parts.items()
        }

    found = on_each(count, work)
    total = float(sum(range(1, count + 1)))
    for gradients, _ in found:
        for name, gradient in gradients.items():
            if name == "never":
                assert gradient is None
            else:
                assert gradient.flatten().tolist() == [total] * gradient.numel()
    for name, shape in SHAPES.items():  # every element is in one slice
        assert sum(sizes.get(name, 0) for _, sizes in found) == torch.Size(shape).numel()


def test_gradient_of_one_replica_counts_for_all():
    def work(end):
        named, shards = shards_of(end, 2)
        with_gradients(named, shards, end.device, ("a", "b") if end.device else ("b",))
        if end.device == 0:
            shards.gradients[named["a"]].zero_()
        ShardedReduction(shards, end).wait()
        part = shards.parts.get("a")
        return [] if part is None else part.value.grad.flatten().tolist()

    assert [value for each in on_each(2, work) for value in each] == [2.0] * 3


def test_missing_gradient_counts_as_zeros_in_the_sum():
    def work(end):
        named, shards = shards_of(end, 2)
        shards.gradients[named["b"]].fill_(99.0)
        with_gradients(named, shards, end.device, ("a", "b") if end.device else ("a",))
        ShardedReduction(shards, end).wait()
        return [value for name in ("b",) if name in shards.parts for value in shards.parts[name].value.grad.tolist()]

    assert [value for each in on_each(2, work) for value in each] == [2.0] * 4


def test_parameters_are_gathered_from_the_slices():
    def work(end):
        named, shards = shards_of(end, 2)
        with_gradients(named, shards, end.device)
        ShardedReduction(shards, end).wait()
        with torch.no_grad():
            for part in shards.parts.values():
                part.value.fill_(10.0 + end.device)
        gather = Gather(shards, end)
        assert gather.bytes == sum(bucket.nbytes for bucket in shards.buckets)
        assert all(part.value.grad is None for part in shards.parts.values())
        gather.wait()
        return [p.detach().flatten().tolist() for p in named.values()]

    first, second = on_each(2, work)
    assert first == second
    assert {value for each in first for value in each} == {10.0, 11.0}
