"""Options of a search: the choices and the meter that follow from them, and counts that are refused."""

import pytest
from panpipe.core.errors import RequestError
from panpipe.core.schedules.registry import find_family
from panpipe.core.search.problem.options import MAX_CHUNKS
from panpipe.core.search.search_options import SearchOptions, refuse_none

FAMILIES = [find_family("1f1b"), find_family("zb-h1")]


def test_search_space_has_the_choices_of_the_options():
    space = SearchOptions(families=FAMILIES, anneal=False, recompute=None, min_chunks=2).space()
    assert (space.families, space.anneal, space.recompute) == (tuple(FAMILIES), False, None)
    assert space.chunks == (2, MAX_CHUNKS)


def test_number_of_given_stages_replaces_the_bounds_on_it():
    assert SearchOptions(families=FAMILIES, min_chunks=2, max_chunks=4).space(3).chunks == (3, 3)


def test_meter_counts_to_the_budget_of_the_options_or_to_the_default():
    assert SearchOptions(families=FAMILIES).meter(100).budget == 100
    meter = SearchOptions(families=FAMILIES, budget=7, seconds=2.0, until_fit=True).meter(100)
    assert (meter.budget, meter.seconds, meter.until_fit) == (7, 2.0, True)


@pytest.mark.parametrize(
    ("options", "said"), [({"budget": 0}, "0 evaluations: a search needs"), ({"min_chunks": -1}, "-1 chunks: a device")]
)
def test_counts_below_one_are_refused(options, said):
    with pytest.raises(RequestError, match=said):
        SearchOptions(families=FAMILIES, **options)
    refuse_none(1, "devices")
