"""Generators of random draws in a captured graph: registered before it, and seeded for each replay."""

import pytest
import torch
from panpipe.core.capture.graph import random_draws as keyed_attention
from panpipe.core.capture.graph.random_draws import GraphGenerators, generator_of, graph_generators, seed_of
from panpipe.core.capture.graph.randomness import bernoulli, random_key

CPU = torch.device("cpu")
LIKE = torch.empty(100)


def test_draws_use_the_generators_of_the_graph_without_reading_the_key():
    generators = GraphGenerators(CPU, [3, 5])
    for step in range(2):
        key = random_key(1, step, 0)
        generators.seed(key)
        with generators.active():
            assert graph_generators() is generators
            found = [bernoulli(LIKE, 0.5, torch.full((3,), -1), ordinal) for ordinal in (5, 3)]
        wanted = [bernoulli(LIKE, 0.5, key, ordinal) for ordinal in (5, 3)]
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert graph_generators() is None


def test_draw_without_a_generator_is_an_error():
    with GraphGenerators(CPU, [3]).active(), pytest.raises(RuntimeError, match=r"draw 4 has no generator .* \[3\]"):
        generator_of(random_key(1, 0, 0), 4, CPU)


class Swapped:
    """The default generator of a GPU, as far as its state is exchanged in a capture."""

    def __init__(self):
        self.state = "its own"

    def graphsafe_get_state(self):
        return self.state

    def graphsafe_set_state(self, state):
        self.state = state


def test_attention_swaps_the_state_of_the_default_generator_in_a_capture(monkeypatch):
    default, generators = Swapped(), GraphGenerators(CPU, [7])
    monkeypatch.setattr(keyed_attention, "default_generator", lambda device: default)
    with generators.active(), keyed_attention._seeded(CPU, torch.full((3,), -1), 7):
        assert default.state is generators.of(7)
    assert default.state == "its own"


def test_attention_seeds_the_default_generator_outside_of_a_capture(monkeypatch):
    default, key = torch.Generator(), random_key(1, 2, 3)
    monkeypatch.setattr(keyed_attention, "default_generator", lambda device: default)
    before = default.get_state()
    with keyed_attention._seeded(CPU, key, 7):
        assert default.initial_seed() == seed_of(key, 7)
    assert torch.equal(default.get_state(), before)
