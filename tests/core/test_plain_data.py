"""Plain data: values as JSON bytes, between ranks and in checkpoints."""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from panpipe.core.plain_data import decode, encode

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary()
KEYS = st.text(max_size=3) | st.integers() | st.tuples(st.text(max_size=2), st.integers())
VALUES = st.recursive(
    LEAVES,
    lambda below: (
        st.lists(below, max_size=3)
        | st.lists(below, max_size=3).map(tuple)
        | st.dictionaries(KEYS, below, max_size=3)
        | st.frozensets(st.integers(), max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(VALUES)
def test_plain_data_is_equal_after_json(value):
    assert decode(encode(value)) == value
    assert encode(decode(encode(value))) == encode(value)  # the types are in the bytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "[1]",
        "[]",
        '["unknown",1]',
        '["object","os:system",["true"]]',
        '["object","core.plain_data:exchanged",["true"]]',
        '["object","core.cluster.mesh:Mesh",[1]]',
        '["object","core.plain_data:import_module",["os"]]',
        '["object","core....os:path",[]]',
        '["object","core.errors:RequestError",["x"]]',
        '["object",1,2]',
        '["object"]',
        '["dict",1]',
        '["dict",["list",["list"],2]]',
        '["tensor","float32",[1],""]',
        '["tensor","float32",[-1],""]',
        '["tensor","load",[1],""]',
        '["tensor","float32",[1073741824,1073741824],""]',
        '["device","abacus"]',
        '["float"]',
        '["kind","?"]',
        "[" * 100_000,
        '["list",' * 5_000 + "1" + "]" * 5_000,
        "1" * 10_000,
    ],
)
def test_bytes_that_are_no_plain_data_raise_value_errors(text):
    with pytest.raises(ValueError):  # noqa: PT011 - messages are those of json, too
        decode(text)


def test_pickles_are_not_read():
    with pytest.raises(ValueError):  # noqa: PT011
        decode(pickle.dumps([1]))
