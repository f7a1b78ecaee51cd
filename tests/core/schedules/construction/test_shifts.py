"""Moves of one action in a coded order: what stays in order, what is joined, and what is accepted."""

import numpy as np
import pytest
from panpipe.core.evaluate.coding import decode_orders, encode
from panpipe.core.schedules.construction.shifts import join, metropolis, shift

from ....support.plans import orders

COUNT = 3


def coded(text, stages=2):
    rows, lengths = encode(orders(text), stages, COUNT)
    return rows[0], int(lengths[0]), np.repeat(np.arange(stages), COUNT)


def text(row, length, stages=2):
    (actions,) = decode_orders(row[None], np.array([length]), stages, COUNT)
    return " ".join(map(str, actions))


@pytest.mark.parametrize(
    ("start", "goal", "order"),
    [
        (3, 0, "0F0 0F1 1F0 0B0 1B0"),  # 0F1 passes 0B0 of another microbatch, and stops after 0F0
        (1, 4, "0F0 0B0 0F1 1F0 1B0"),  # 1F0 stops before its own backward
        (0, 3, "1F0 0F0 0B0 0F1 1B0"),  # 0F0 stops before its own backward
    ],
)
def test_action_moves_as_far_as_its_own_stage_allows(start, goal, order):
    row, length, stage_of = coded("0F0 1F0 0B0 0F1 1B0")
    found = shift(row, start, goal, stage_of)
    moved = text(row, length).split()
    assert moved == order.split()
    assert moved[found] == ["0F0", "1F0", "0B0", "0F1", "1B0"][start]


def test_move_to_its_own_position_changes_nothing():
    row, length, stage_of = coded("0F0 1F0 0B0 0F1 1B0")
    assert shift(row, 2, 2, stage_of) == 2
    assert text(row, length) == "0F0 1F0 0B0 0F1 1B0"


def test_halves_next_to_each_other_are_joined_within_the_given_codes():
    source = "0F0 0I0 0W0 0F1 0I1 1F0 0W1 1I0 1W0"
    row, length, _ = coded(source)
    assert text(row, join(row, length, 0, 4 * 2 * COUNT)) == "0F0 0B0 0F1 0I1 1F0 0W1 1B0"
    row, length, _ = coded(source)
    assert text(row, join(row, length, 4 * COUNT, 4 * 2 * COUNT)) == "0F0 0I0 0W0 0F1 0I1 1F0 0W1 1B0"


def test_annealing_accepts_nothing_worse_without_warmth_and_never_refuses_the_same_value():
    assert metropolis(5.0, 0.0) == 5.0
    drawn = [metropolis(5.0, 0.5) for _ in range(200)]
    assert min(drawn) >= 5.0
    assert 5.2 < sum(drawn) / len(drawn) < 5.9  # exponential, with a mean of the temperature
