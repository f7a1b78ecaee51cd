"""JSON of unknown origin: strict, and within limits whatever the file holds."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from panpipe.core.errors import RequestError
from panpipe.core.files.json_reader import parse_json
from panpipe.core.files.limits import Limits

FEW = Limits(size=1000, depth=3, values=10, text=20, lines=30)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text('ab"[]{}\\,', max_size=8),
    lambda below: st.lists(below, max_size=4) | st.dictionaries(st.text('a"[{\\', max_size=4), below, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(VALUES, st.integers(0, 6))
def test_nesting_above_the_limit_is_refused_and_no_other(value, limit):
    def depth(value):
        below = value.values() if isinstance(value, dict) else value
        return 1 + max(map(depth, below), default=0) if isinstance(value, dict | list) else 0

    if depth(value) > limit:
        with pytest.raises(RequestError, match="nested"):
            parse_json(json.dumps(value), "x", Limits(depth=limit))
    else:
        parse_json(json.dumps(value), "x", Limits(depth=limit))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 9 + "]" * 9, "nested deeper than 3 levels"),
        ('{"a":' * 9 + "1" + "}" * 9, "nested deeper than 3 levels"),
        ("[0" + ",0" * 10 + "]", "more than 10 values"),
        ('{"a": 1, "a": 2}', "the key 'a' twice"),
        ("9" * 5000, "has 5000 digits"),
        ("-" + "9" * 5000, "has 5001 digits"),
        ("18446744073709551616", "must be below"),
        ("1e999", "too large for a float"),
        ("1." + "0" * 5000, "has 5002 characters"),
        ('"' + "a" * 21 + '"', "a text of 21 characters"),
        ('{"' + "a" * 21 + '": 1}', "a text of 21 characters"),
        ('"a\\u0000b"', "cannot be printed"),
        ('"a\\nb"', "cannot be printed"),
        ('"\\u202e"', "cannot be printed"),
        ('"\\ud800"', "cannot be printed"),
        ("", "is empty: give a JSON file"),
        ('{"a": 1', "not a whole JSON file"),
        ("[1]]", "not a whole JSON file"),
    ],
)
def test_json_outside_the_limits_is_refused_in_one_line(text, message):
    with pytest.raises(RequestError) as caught:
        parse_json(text, "file.json", FEW)
    assert message in str(caught.value)
    assert str(caught.value).startswith("file.json ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
