"""A cut carried over to other shapes: onto itself, over nodes that come and go, and what is refused."""

import functools
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from panpipe.core.capture.export.carry_over import carry_over, cut_of
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.capture.programs.stage import boundaries
from panpipe.core.errors import RequestError
from torch import nn

from ....support.models import ConvNet, TinyGPT, conv_step, gpt_step


def tokens(rows, length):
    return {name: torch.zeros(rows, length, dtype=torch.int64) for name in ("x", "y")}


def images(rows, size):
    return {"x": torch.zeros(rows, 3, size, size), "y": torch.zeros(rows, dtype=torch.int64)}


def vectors(rows, length):
    return torch.zeros(rows, length, 4)


def capture(model, step, batch):
    return operators_of(capture_step(model.train(), step, batch))


@functools.cache
def gpt(rows, length):
    return capture(TinyGPT(), gpt_step, tokens(rows, length))


@functools.cache
def conv(rows, size):
    return capture(ConvNet(), conv_step, images(rows, size))


CAPTURES = {gpt: [(1, 1), (1, 12), (2, 1), (2, 12), (3, 16)], conv: [(1, 8), (2, 8), (2, 11)]}
"""Of a model → its sizes."""


def parts(names, ends):
    return [names[a:b] for a, b in itertools.pairwise([0, *sorted(ends), len(names)])]


def check(cut, operators, stages):
    """Every operator has a stage, stages do not descend, and parameters stay where they were."""
    layout = boundaries(operators, stages)  # covers every operator, or raises
    assert all(sender < reader for sender, reader in layout)
    read = {node.name: node.parameters for node in operators.graph.nodes}
    for index, names in enumerate(stages):
        assert {p for name in names for p in read[name]} <= cut.parameters[index]


@given(st.sampled_from([*CAPTURES]), st.data())
def test_cut_carries_over_to_every_shape_and_to_its_own_graph(captured, data):
    known, other = (captured(*data.draw(st.sampled_from(CAPTURES[captured]))) for _ in range(2))
    names = list(known.members)
    stages = parts(names, data.draw(st.sets(st.integers(1, len(names) - 1), max_size=6)))
    cut = cut_of(known, stages)
    again, same = carry_over(cut, known)
    assert again is known
    assert [list(stage) for stage in same] == stages
    carried, found = carry_over(cut, other)
    check(cut, carried, found)


class Scan(nn.Module):
    """A loop in Python over the time, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.cell, self.after = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        x = self.before(x)
        h = torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            h = torch.tanh(self.cell(h) + x[:, t])
        return self.after(h)


def scan_step(model, x):
    return model(x).square().mean()


@pytest.mark.parametrize("lengths", [(3, 7), (7, 3), (3, 1), (1, 3)])
def test_cut_carries_over_to_fewer_and_more_iterations_of_a_loop(lengths):
    known, other = (capture(Scan(), scan_step, vectors(2, length)) for length in lengths)
    names = list(known.members)
    for ends in itertools.combinations(range(1, len(names)), 2):
        cut = cut_of(known, parts(names, ends))
        check(cut, *carry_over(cut, other))


class Crossing(nn.Module):
    """Layers whose order depends on the length, and one that short sequences alone go through."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        if x.shape[1] == 2:
            return self.b(self.c(self.a(x)))
        return self.b(self.a(x)) if x.shape[1] < 6 else self.a(self.b(x))


@pytest.mark.parametrize(
    ("length", "said"),
    [
        (6, "'b/linear' runs in stage 1.*and 'a/linear', which depends on it, in stage 0 .*build another pipeline"),
        (2, "'c/linear' uses 'c.weight', which no stage holds.*give an example batch"),
    ],
)
def test_cut_that_cannot_carry_over_is_refused_in_one_line(length, said):
    known, other = (capture(Crossing(), scan_step, vectors(2, n)) for n in (4, length))
    names = list(known.members)
    cut = cut_of(known, parts(names, [names.index("b/linear")]))
    with pytest.raises(RequestError, match=said) as refusal:
        carry_over(cut, other)
    assert "\n" not in str(refusal.value)
