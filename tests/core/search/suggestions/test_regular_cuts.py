"""Regular cuts: the same stages from measurements that differ by their noise."""

import random

from attrs import evolve
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode
from panpipe.core.search.suggestions.regular_cuts import regular_cut, thin_positions

LAYER = ((0.1, 1), (1.0, 3), (0.1, 2), (1.0, 2), (0.1, 1))
"""Seconds of each operator of a layer, and bytes that it hands on in addition to the layer's input."""


def layers(count, first=0.2, last=0.5):
    """A chain of layers; each operator reads the one before, and the last of a layer its input, too."""
    nodes, edges = [OpNode("in", first)], []
    for layer in range(count):
        start = nodes[-1].name
        for place, (seconds, _) in enumerate(LAYER):
            name = f"{layer}.{place}"
            edges.append(OpEdge(nodes[-1].name, name, 1 if place == 0 else LAYER[place - 1][1]))
            nodes.append(OpNode(name, seconds))
        edges.append(OpEdge(start, nodes[-1].name, 1))
    edges.append(OpEdge(nodes[-1].name, "out", 1))
    return OpGraph((*nodes, OpNode("out", last)), tuple(edges))


def noisy(graph, seed, share=0.05):
    source = random.Random(seed)
    changed = (evolve(node, forward_s=node.forward_s * source.uniform(1 - share, 1 + share)) for node in graph.nodes)
    return evolve(graph, nodes=tuple(changed))


def test_thin_positions_are_those_between_layers():
    assert thin_positions(layers(3)) == [1, 6, 11, 16]


def test_regular_cut_is_between_layers_and_as_even_as_possible():
    assert [len(stage) for stage in regular_cut(layers(6), 2)] == [16, 16]
    assert [len(stage) for stage in regular_cut(layers(6), 3)] == [11, 10, 11]


def test_noise_of_measured_times_does_not_change_the_cut():
    graph = layers(12)
    for count in (2, 3, 4, 6):
        assert len({regular_cut(noisy(graph, seed), count) for seed in range(20)}) == 1


def test_times_decide_if_they_differ_by_more_than_noise():
    assert [len(stage) for stage in regular_cut(layers(6, last=5.0), 2)] == [21, 11]


def test_more_stages_than_thin_positions_have_no_regular_cut():
    assert regular_cut(layers(2), 4) is not None
    assert regular_cut(layers(2), 5) is None
    assert regular_cut(OpGraph((OpNode("a", 1.0),)), 1) == (("a",),)
