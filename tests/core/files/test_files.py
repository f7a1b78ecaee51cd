"""Files of unknown origin are read within limits, and written whole or not at all."""

import json
import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st
from panpipe.core.errors import RequestError
from panpipe.core.files.json_reader import parse_json
from panpipe.core.files.limits import Limits
from panpipe.core.files.read import file_below, read_bytes, read_text
from panpipe.core.files.write import replace_file, write_text

# Reading a named file: regular files alone, up to a size, in UTF-8.


def test_text_that_is_no_utf_8_is_refused(tmp_path):
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe")
    with pytest.raises(RequestError, match="not UTF-8 text"):
        read_text(tmp_path / "plan.json")


def test_file_of_the_largest_size_is_read_and_a_larger_one_is_refused(tmp_path):
    (tmp_path / "plan.json").write_bytes(b"1234")
    assert read_bytes(tmp_path / "plan.json", 4) == b"1234"
    with pytest.raises(RequestError, match="has more than 3 bytes"):
        read_text(tmp_path / "plan.json", Limits(size=3))


def test_pipe_folder_and_missing_file_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, reason in (("pipe", "not a regular file"), (".", "Is a directory"), ("missing", "No such file")):
        with pytest.raises(RequestError, match=f"cannot read '.*': .*{reason}"):
            read_bytes(tmp_path / name)
    with pytest.raises(RequestError, match="null"):
        read_bytes("a\0b")


def test_link_out_of_the_folder_is_refused_unless_it_leads_to_a_further_folder(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "b").write_bytes(b"")
    (tmp_path / "own" / "link").symlink_to(tmp_path / "blobs" / "b")
    with pytest.raises(RequestError, match="outside its folder"):
        file_below(tmp_path / "own", "link", "index")
    assert file_below(tmp_path / "own", "link", "index", also=tmp_path / "blobs") == tmp_path / "own" / "link"


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


# Writing a file: whole or not at all, without links, with the user's permissions.


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_replaced_file_keeps_its_permissions_and_nothing_is_left(tmp_path):
    path = tmp_path / "a"
    write_text(path, "old")
    path.chmod(0o600)
    write_text(path, "new")
    assert path.read_text(encoding="utf-8") == "new"
    assert mode_of(path) == 0o600
    assert os.listdir(tmp_path) == ["a"]


def test_failed_write_leaves_the_old_file_and_no_temporary_one(tmp_path):
    def parts():
        yield b"half"
        raise OSError(28, "No space left on device")

    replace_file(tmp_path / "a", [b"old"])
    with pytest.raises(OSError, match="No space left"):
        replace_file(tmp_path / "a", parts(), durable=True)
    assert (tmp_path / "a").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_link_is_replaced_and_its_target_is_unchanged(tmp_path):
    (tmp_path / "target").write_text("keep", encoding="utf-8")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "target").read_text(encoding="utf-8") == "keep"
    assert not (tmp_path / "link").is_symlink()
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    write_text(tmp_path / "dangling", "new")
    assert not (tmp_path / "nothing").exists()


def test_pipes_and_devices_are_written_directly(tmp_path):
    write_text("/dev/null", "text")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    read, write = os.pipe()
    write_text(f"/dev/fd/{write}", "text")
    os.close(write)
    assert os.read(read, 100) == b"text"
    os.close(read)


# JSON of unknown origin: strict, and within limits whatever the file holds.


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
