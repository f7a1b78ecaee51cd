"""Orders of one device: groups, merging, and microbatches that do not exist."""

import pytest
from panpipe.core.actions import Kind
from panpipe.core.schedules.construction.order import existing, grouped, merge

from ....support.plans import orders


def text(actions):
    return " ".join(map(str, actions))


def test_groups_go_through_all_stages_one_after_another():
    assert text(grouped((0, 4), Kind.F, (2, 1))) == "0F0 0F1 4F0 4F1 0F2 4F2"
    assert text(grouped((4, 0), Kind.B, (2,))) == "4B0 4B1 0B0 0B1"
    assert grouped((0,), Kind.F, ()) == []


@pytest.mark.parametrize(
    ("ahead", "order"),
    [
        (1, "0F0 0B0 0F1 0B1 0F2 0B2"),
        (2, "0F0 0F1 0B0 0F2 0B1 0B2"),
        (3, "0F0 0F1 0F2 0B0 0B1 0B2"),
        (9, "0F0 0F1 0F2 0B0 0B1 0B2"),
    ],
)
def test_forwards_run_ahead_and_then_alternate_with_backwards(ahead, order):
    forwards, backwards = (grouped((0,), kind, (3,)) for kind in (Kind.F, Kind.B))
    assert text(merge(forwards, backwards, ahead, 3)) == order


def test_microbatches_that_do_not_exist_count_ahead_and_are_left_out():
    forwards, backwards = (grouped((0,), kind, (4,)) for kind in (Kind.F, Kind.B))
    assert text(merge(forwards, backwards, 2, 3)) == "0F0 0F1 0B0 0F2 0B1 0B2"
    assert text(existing(orders("0F0 0F1 0STEP 0B1 0B0")[0], 1)) == "0F0 0B0"
