"""Parameters of a search for schedules."""

import pytest
from panpipe.answers.schedule_search import check_search
from panpipe.core.errors import InfeasibleError, RequestError


@pytest.mark.parametrize("given", [{}, {"evaluations": 1}, {"seconds": 0.5}, {"seed": 2**31 - 1}])
def test_parameters_within_their_ranges_are_accepted(given):
    check_search(given, 1)
    check_search(given, None)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"evaluations": 0}, "--evaluations is 0: give at least 1"),
        ({"seconds": 0}, "--seconds is 0: give a finite number above 0"),
        ({"seconds": float("inf")}, "--seconds is inf"),
        ({"seconds": float("nan")}, "--seconds is nan"),
        ({"evaluations": 5, "seconds": 1.0}, "a search has one budget"),
        ({"seed": -1}, "--seed is -1: give a number from 0 to 2147483647"),
        ({"seed": 2**31}, "--seed is 2147483648"),
    ],
)
def test_parameter_out_of_its_range_is_refused(given, text):
    with pytest.raises(RequestError, match=text):
        check_search(given, None)


def test_limit_below_one_microbatch_is_infeasible():
    with pytest.raises(InfeasibleError, match=r"the memory limit is 0.5: one microbatch .* needs 1"):
        check_search({}, 0.5)
