"""Graphs of the tests: what they repeat is what the operators compute."""

import torch
from panpipe.core.capture.graph.random_draws import GraphGenerators

from ....support.backends.fake_graphs import FakeGraphPool

CPU = torch.device("cpu")


def test_operators_take_offsets_in_the_storage_of_their_operand():
    pool, found = FakeGraphPool(CPU), []
    with pool.allocating():
        _before, whole = torch.empty(100), torch.empty(6)
    part = torch.tensor([7.0, 8.0])

    def run():
        found.append(pool.alias(torch.as_strided_scatter(whole[1:], part, (2,), (1,), 3)))

    graph = pool.capture(run, GraphGenerators(CPU, []))
    pool.alias(whole).copy_(torch.arange(6.0))
    graph.replay()
    assert torch.equal(found[0], torch.tensor([1.0, 2.0, 7.0, 8.0, 5.0]))


def test_tensors_without_numbers_need_no_memory():
    pool, found = FakeGraphPool(CPU), []
    with pool.allocating():
        whole = torch.empty(6)

    def run():
        empty = torch.empty_like(whole)[6:]
        found.append(pool.alias(torch.cat((whole, empty))))

    graph = pool.capture(run, GraphGenerators(CPU, []))
    pool.alias(whole).copy_(torch.arange(6.0))
    graph.replay()
    assert torch.equal(found[0], torch.arange(6.0))
