"""JSON of unknown origin: strict, and within limits whatever the file holds."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from panpipe.core.errors import RequestError
from panpipe.core.files.json_reader import parse_json
from panpipe.core.files.limits import Limits

FEW = Limits(size=1000, values=10)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text('ab"[]{}\\,', max_size=8),
    lambda below: st.lists(below, max_size=4) | st.dictionaries(st.text('a"[{\\', max_size=4), below, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(VALUES)
def test_json_within_limits_is_read_as_the_standard_library_does(value):
    text = json.dumps(value)
    assert parse_json(text, "x") == json.loads(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ("[0" + ",0" * 10 + "]", "more than 10 values"),
        ('{"a": 1, "a": 2}', "the key 'a' twice"),
        ("9" * 5000, "cannot be read"),
        ("", "is empty: give a JSON file"),
        ('{"a": 1', "not a whole JSON file"),
        ("[1]]", "not a whole JSON file"),
    ],
)
def test_json_outside_the_limits_is_refused_in_one_line(text, message):
    with pytest.raises(RequestError) as caught:
        parse_json(text, "file.json", FEW if len(text) < 1000 else Limits())
    assert message in str(caught.value)
    assert str(caught.value).startswith("file.json ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
