"""Readers of JSON, TOML and CSV: strict, and within limits whatever the file holds."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from panpipe.core.errors import RequestError
from panpipe.core.files.csv_reader import parse_csv
from panpipe.core.files.json_reader import parse_json
from panpipe.core.files.limits import Limits
from panpipe.core.files.read import file_below, read_bytes, read_text
from panpipe.core.files.toml_reader import parse_toml

FEW = Limits(size=1000, depth=3, values=10, text=20, lines=30)

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
        ("[" * 9, "nested deeper than 3 levels"),
        ('{"a":' * 9, "nested deeper than 3 levels"),
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
        ("", "not a whole JSON file"),
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


def test_brackets_in_texts_are_no_nesting():
    text = json.dumps(["[[[[", '"[[[[', "\\", '[[\\"[['])
    assert parse_json(text, "x", Limits(depth=1)) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = " + "[" * 9 + "]" * 9, "nested too deep"),
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\r\n" + "c" * 21, "row 2, column 1"),
        ("," * 11, "more than 10 cells"),
        ('"' + "a" * 200_000, "row 1"),
    ],
)
def test_csv_outside_the_limits_is_refused(text, message):
    with pytest.raises(RequestError) as caught:
        list(parse_csv(text, "file.csv", FEW))
    assert message in str(caught.value)


def test_csv_rows():
    assert list(parse_csv('a,"b,c"\r\n,d\r\n', "x", FEW)) == [["a", "b,c"], ["", "d"]]


def test_what_is_no_regular_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero", "/dev/null"):
        with pytest.raises(RequestError, match="no regular file"):
            read_bytes(path)
    for path, message in (
        (tmp_path, "Is a directory"),
        (tmp_path / "a\0b", "null"),
        ("a" * 5000, "File name too long"),
    ):
        with pytest.raises(RequestError, match=message):
            read_text(path)


def test_file_above_the_limit_is_refused_and_a_byte_order_mark_is_skipped(tmp_path):
    (tmp_path / "large").write_bytes(b"a" * 1001)
    with pytest.raises(RequestError, match="more than 1000 bytes"):
        read_text(tmp_path / "large", FEW)
    (tmp_path / "marked").write_bytes(b"\xef\xbb\xbf{}")
    assert read_text(tmp_path / "marked") == "{}"


def test_file_named_by_another_stays_in_its_folder(tmp_path):
    folder, other = tmp_path / "folder", tmp_path / "other"
    for each in (folder / "below", other):
        each.mkdir(parents=True)
        (each / "file").write_text("", encoding="utf-8")
    (folder / "out").symlink_to(other / "file")
    (folder / "away").symlink_to(other)
    (folder / "in").symlink_to(folder / "below" / "file")
    (folder / "loop").symlink_to(folder / "loop")
    for name in ("below/file", "in", "missing"):
        assert file_below(folder, name, "index") == folder / name
    for name in (
        "../other/file",
        str(other / "file"),
        "below/../../other/file",
        "",
        "out",
        "away/file",
        "loop",
        "a\0b",
    ):
        with pytest.raises(RequestError, match="index"):
            file_below(folder, name, "index")
    assert file_below(folder, "out", "index", also=other) == folder / "out"
