"""Plain data: values as JSON bytes, between ranks and in checkpoints."""

import json
import math
import pickle
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from panpipe.core.actions import Kind, parse_action
from panpipe.core.cluster.mesh import Mesh
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode
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


def same(one, other):
    return type(one) is type(other) and repr(one) == repr(other)


@settings(max_examples=200, deadline=None)
@given(VALUES)
def test_plain_data_is_equal_after_json(value):
    assert decode(encode(value)) == value
    assert encode(decode(encode(value))) == encode(value)  # the types are in the bytes


@pytest.mark.parametrize(
    "value",
    [
        Mesh(2, 2),
        OpGraph((OpNode("a", 1.5, parameters=("w",)), OpNode("b")), (OpEdge("a", "b", 4),), name="g"),
        {("a", 1): parse_action("2F0"), parse_action("0SEND_F3>2"): math.inf, Kind.W: -math.inf},
        OrderedDict([("b", 1), ("a", (2, [3]))]),
        Counter({3: 2, 1: 1}),
        {1, 2},
        torch.bfloat16,
        Path("a/b"),
        torch.device("cuda", 1),
    ],
)
def test_classes_and_containers_keep_their_type(value):
    assert decode(encode(value)) == value
    assert same(decode(encode(value)), value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128, torch.bool, torch.int64])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors_keep_their_bits(dtype, shape):
    value = torch.randn(shape).to(dtype)
    found = decode(encode({"x": value.t() if value.ndim == 2 else value}))["x"]
    assert found.dtype == dtype
    assert torch.equal(found, value.t() if value.ndim == 2 else value)


def test_numpy_numbers_become_python_numbers():
    assert same(decode(encode([np.float64(0.5), np.int32(3)])), [0.5, 3])
    assert math.isnan(decode(encode(math.nan)))


class Unknown:
    pass


@pytest.mark.parametrize("value", [Unknown(), lambda: None, defaultdict(list), 1j])
def test_other_types_are_refused_with_their_path(value):
    with pytest.raises(TypeError, match=r"\Aa\[1\] is of type \w+: only numbers"):
        encode({"a": [0, value]})


def test_items_of_checkpoints_have_no_objects():
    with pytest.raises(TypeError, match="is of type Mesh"):
        encode(Mesh(2), objects=False)
    with pytest.raises(ValueError, match="unknown tag 'object'"):
        decode(encode(Mesh(2)), objects=False)


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


def test_dicts_with_string_keys_are_json_objects():
    assert json.loads(encode({"a": {"b": 1}})) == {"a": {"b": 1}}
