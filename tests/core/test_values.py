"""Actions, sizes, names and documents: read from text, written, and what is refused."""

import json
import os
import pickle
import subprocess
import sys

import pytest
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from panpipe.core.actions import COMM_KINDS, SEND_KINDS, Action, Kind, known_kinds, parse_action
from panpipe.core.arguments import byte_size, whole_number
from panpipe.core.documents import from_json, to_json
from panpipe.core.errors import RequestError
from panpipe.core.plain_data import decode, encode
from panpipe.core.wording import nearest

# Actions and their text.


def actions():
    number = st.integers(0, 10**6)

    def of(kind):
        microbatch = st.one_of(st.none(), number) if kind.whole_step is None else number
        microbatch = st.none() if kind.whole_step else microbatch
        peer = number if kind in COMM_KINDS else st.none()
        return st.builds(Action, number, st.just(kind), microbatch, peer)

    return st.sampled_from(known_kinds()).flatmap(of)


@given(actions())
def test_parse_action_is_the_inverse_of_str(action):
    assert parse_action(str(action)) == action


@given(actions().filter(lambda action: action.peer is not None))
def test_send_and_its_receive_are_each_other_s_counterpart(action):
    other = action.counterpart
    assert other.counterpart == action
    assert (other.kind in SEND_KINDS) != (action.kind in SEND_KINDS)
    assert (other.stage, other.peer, other.microbatch) == (action.peer, action.stage, action.microbatch)
    assert other.kind.value[-1] == action.kind.value[-1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1F0junk", "'1F0junk' is not an action: write <stage><kind><microbatch>"),
        ("", "'' is not an action"),
        ("F0", "'F0' is not an action"),
        ("-1F0", "'-1F0' is not an action"),
        ("1X0", "'1X0' is not an action"),
        ("1F", "'1F' is not an action: F needs a microbatch"),
        ("1STEP0", "'1STEP0' is not an action: STEP takes no microbatch"),
        ("1F0>2", "'1F0>2' is not an action: a send names its peer stage after"),
        ("1SEND_F0<2", "'1SEND_F0<2' is not an action: a send names its peer stage after"),
        ("1RECV_B0>2", "'1RECV_B0>2' is not an action: a send names its peer stage after"),
    ],
)
def test_text_that_is_not_an_action_is_refused(text, message):
    with pytest.raises(RequestError) as caught:
        parse_action(text)
    assert message in str(caught.value)


# Sizes in bytes, with and without units.


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (None, None), (20, 20), ("20", 20), ("2e3", 2000), (1.5, 1.5), ("80GB", 80_000_000_000), ("16 GiB", 16 << 30),
        ("1.5mb", 1_500_000), ("512KB", 512_000), ("3tib", 3 << 40), ("7B", 7),
    ],
)  # fmt: skip
def test_a_size_is_read_with_and_without_a_unit(given, wanted):
    assert byte_size("limit", given) == wanted


@pytest.mark.parametrize("given", ["", "GB", "20XB", "1.2.3GB", "-1", -1, "nan", "1e999", True, [], "20 GB of it"])
def test_what_is_no_size_is_refused(given):
    with pytest.raises(RequestError, match=r"limit is .*give bytes"):
        byte_size("limit", given)


def test_a_number_without_its_unit_is_refused_where_a_model_has_to_fit():
    with pytest.raises(RequestError, match="limit is 20 bytes, in which no model fits: give the unit, too, as in 20GB"):
        byte_size("limit", "20", model=True)
    assert byte_size("limit", "20B", model=True) == 20


# Suggestions for names that are not known.


FEW = ["1f1b", "gpipe", "zb-h1", "zb-h2"]


@pytest.mark.parametrize(
    ("name", "known", "said"),
    [
        ("gpip", FEW, "did you mean gpipe"),
        ("GPIPE", FEW, "did you mean gpipe"),
        ("zb-h3", FEW, "did you mean zb-h1 or zb-h2"),
        ("qqq", FEW, "known are 1f1b, gpipe, zb-h1, zb-h2"),
        ("A100", ["a100", "H100"], "did you mean a100"),
    ],
)
def test_names_that_look_alike_are_suggested_else_all_of_few(name, known, said):
    found = nearest(name, known)
    assert sorted(found.removeprefix("did you mean ").split(" or ")) == sorted(
        said.removeprefix("did you mean ").split(" or ")
    )


# Whole numbers that users give.


@pytest.mark.parametrize("given", [0, -1, 2.0, 2.5, "4", True, None, [1]])
def test_other_values_are_refused_with_the_name_and_the_rule(given: object) -> None:
    with pytest.raises(RequestError) as refused:
        whole_number("microbatches", given, 1)
    assert str(refused.value) == f"microbatches is {given!r}: give a whole number, at least 1"


# Plain data: values as JSON bytes, between ranks and in checkpoints.


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


# Reading and writing JSON documents.


FORMAT = "panpipe.example/1"


@frozen
class Example:
    name: str
    sizes: tuple[int, ...]
    order: tuple[tuple[Action, ...], ...] = ()


EXAMPLE = Example("a", (1, 2), ((Action(0, Kind.F, 0), Action(0, Kind.SEND_F, 0, 1)),))


def test_format_comes_first_and_actions_are_text():
    assert json.loads(to_json(FORMAT, EXAMPLE)) == {
        "format": FORMAT,
        "name": "a",
        "sizes": [1, 2],
        "order": [["0F0", "0SEND_F0>1"]],
    }
    assert to_json(FORMAT, EXAMPLE).startswith('{\n "format": ')


def changed(**changes):
    data = {"format": FORMAT, "name": "a", "sizes": [1], **changes}
    return json.dumps({key: value for key, value in data.items() if value is not ...})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (to_json(FORMAT, EXAMPLE)[:-20], "file.json is not a whole JSON file (line "),
        ("[1]", "file.json holds a list, not the object that panpipe.example/1 needs"),
        (changed(format="panpipe.example/2"), "is of format 'panpipe.example/2'; this panpipe reads version 1"),
        (changed(format="panpipe.plan/1"), "file.json is not a panpipe.example file"),
        (changed(format=...), "and states None"),
        (changed(format=1), "and states 1"),
        (changed(sizes=...), "sizes"),
        (changed(sizes=["x"]), "sizes"),
        (changed(more=1), "more"),
        (changed(name="a" * 4097), "a text of more than 4096 characters"),
        (changed(name="a\n"), "characters that cannot be printed"),
        (changed(name="\ud800"), "characters that cannot be printed"),
        (changed(sizes=[10**400]), "is above 2^53"),
        (changed(order=[["0F0x"]]), "'0F0x' is not an action"),
    ],
)
def test_wrong_documents_are_refused(text, message):
    with pytest.raises(RequestError) as caught:
        from_json(text, FORMAT, Example, "file.json")
    assert message in str(caught.value)
    assert str(caught.value).startswith("file.json ")
    assert "\n" not in str(caught.value)


# Plug-ins that cannot be used are reported and do not prevent others.


def test_package_that_raises_does_not_stop_a_command(tmp_path):
    (tmp_path / "raising.py").write_text("raise OSError('no driver')\n", encoding="utf-8")
    record = tmp_path / "raising-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: raising\nVersion: 1.0\n", encoding="utf-8")
    groups = ("panpipe.backends", "panpipe.devices", "panpipe.schedules")
    (record / "entry_points.txt").write_text(
        "".join(f"[{group}]\nbroken = raising:IT\n" for group in groups), encoding="utf-8"
    )
    script = """
from panpipe.backends.registry import find_backend
from panpipe.core.cluster.catalog import find_device
from panpipe.core.schedules.registry import find_family
print(find_backend("gloo").name, find_device("H100").name, find_family("1f1b").name)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        check=True, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)}, encoding="utf-8",
    )  # fmt: skip
    assert done.stdout.split() == ["gloo", "H100", "1f1b"]
    for kind in ("backend", "device", "schedule"):
        told = f"{kind} plug-in 'broken' (raising:IT) is left out: loading it failed with OSError('no driver')"
        assert done.stderr.count(told) == 1, done.stderr
