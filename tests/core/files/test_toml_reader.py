"""TOML of unknown origin: within limits, with texts and numbers alone."""

import pytest
from panpipe.core.cluster.catalog.catalogue import parse_toml
from panpipe.core.errors import RequestError
from panpipe.core.files.limits import Limits

FEW = Limits(size=1000, depth=3, values=10, text=20, lines=30)


def test_toml_within_limits_is_read():
    assert parse_toml("a = 1\n[b]\nc = [0.5, true]\n", "file.toml", FEW) == {"a": 1, "b": {"c": [0.5, True]}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = " + "[" * 9 + "]" * 9, "nested deeper than"),
        ("a" + ".a" * 20 + " = 1", "has a line of"),
        ("a = 0xfffffffffffffffff", "give one below"),
        ("a = 1979-05-27", "has the date 1979-05-27"),
        ("a = 2023-02-30", "not a TOML file"),
        ("a = 1\na = 2", "not a TOML file"),
        ('a = "' + "b" * 21 + '"', "a text of 21 characters"),
        ("a = [1,1,1,1,1,1]\nb = [1,1,1,1,1,1]", "too many values"),
        ("a = 1\0", "not a TOML file"),
    ],
)
def test_toml_outside_the_limits_is_refused(text, message):
    with pytest.raises(RequestError) as caught:
        parse_toml(text, "file.toml", FEW)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_long_integers_and_deep_arrays_of_toml_are_refused():
    for text in ("a = " + "9" * 4090, "a = " + "[" * 4090):
        with pytest.raises(RequestError):
            parse_toml(text, "file.toml")


def test_line_of_the_greatest_length_is_read_and_a_longer_one_is_refused():
    assert parse_toml("a = " + "1" * 6, "x", Limits(lines=10)) == {"a": 111111}
    with pytest.raises(RequestError, match="x has a line of 11 characters: at most 10 are read; divide it"):
        parse_toml("a = " + "1" * 7, "x", Limits(lines=10))


@pytest.mark.parametrize("date", ["1979-05-27", "1979-05-27T07:32:00", "07:32:00"])
def test_dates_in_any_depth_are_refused(date):
    with pytest.raises(RequestError, match="it has texts and numbers only; write it in quotes"):
        parse_toml(f"[a]\nb = [[{date}]]", "x")


@pytest.mark.parametrize("number", ["100", "-100"])
def test_integers_of_any_depth_are_below_the_limit(number):
    assert parse_toml("a = [[99, -99]]", "x", Limits(integer=100)) == {"a": [[99, -99]]}
    with pytest.raises(RequestError, match="give one below"):
        parse_toml(f"a = [[{number}]]", "x", Limits(integer=100))
