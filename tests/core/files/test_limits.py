"""Values of files in error messages, and counts."""

import pytest
from panpipe.core.errors import RequestError
from panpipe.core.files.limits import LONGEST_S, check_count, check_seconds, short


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1, 2], "a list of 2"),
        ({"a": 1}, "an object of 1"),
        (10**100, "an integer of 333 bits"),
        (-12, "-12"),
        ("name", "'name'"),
        ("x" * 81, f"{'x' * 80!r}… (81 characters)"),
        (None, "None"),
    ],
)
def test_value_is_short_in_an_error(value, text):
    assert short(value) == text


def test_count_within_its_limits_is_accepted():
    check_count("stage", 0)
    check_count("stage", 10**7)
    check_count("pp", 1, most=1, least=1)


@pytest.mark.parametrize(("value", "least"), [(-1, 0), (10**7 + 1, 0), (0, 1)])
def test_count_outside_its_limits_is_refused(value, least):
    with pytest.raises(RequestError, match=rf"stage is {value}: it must be from {least} to 10000000; correct it"):
        check_count("stage", value, least=least)


def test_seconds_up_to_a_year_are_accepted():
    check_seconds("latency", 0.0)
    check_seconds("latency", LONGEST_S)


@pytest.mark.parametrize(
    ("value", "rule"),
    [(-1.0, "is -1.0: a time must be"), (float("nan"), "is nan: a time"), (4e7, r"is 4e[+]07 s, more than a year")],
)
def test_seconds_that_are_none_or_above_a_year_are_refused(value, rule):
    with pytest.raises(RequestError, match=f"latency {rule}"):
        check_seconds("latency", value)
