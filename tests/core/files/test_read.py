"""Reading a named file: regular files alone, up to a size, in UTF-8."""

import os

import pytest
from panpipe.core.errors import RequestError
from panpipe.core.files.limits import Limits
from panpipe.core.files.read import file_below, read_bytes, read_text


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
