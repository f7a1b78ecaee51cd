"""Files that are written once: their records, links and pipes, hidden folders, and errors."""

import errno
import os
from pathlib import Path

import pytest
from panpipe.runtimes.checkpoint.durable_files import (
    FileRecord,
    cannot_write,
    hidden_folder,
    read_record,
    read_regular,
    remove_folder,
    remove_hidden,
    write_durable,
)

EMPTY = FileRecord(0, "99aa06d3014798d86001c324468d497f")
"""The XXH3 hash of no bytes, as published."""


def test_record_of_a_written_file_is_that_of_the_file_read(tmp_path):
    path = tmp_path / "tensors"
    written = write_durable(path, [b"ab", memoryview(b"cd")])
    assert path.read_bytes() == b"abcd"
    assert written.bytes == 4
    assert read_record(path) == written
    assert write_durable(tmp_path / "empty", []) == read_record(tmp_path / "empty") == EMPTY


def test_existing_file_and_link_are_not_written(tmp_path):
    (tmp_path / "there").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "new")
    for name in ("there", "link"):
        with pytest.raises(FileExistsError):
            write_durable(tmp_path / name, [b"new"])
    assert (tmp_path / "there").read_bytes() == b"old"
    assert not (tmp_path / "new").exists()


def test_links_and_pipes_are_not_read(tmp_path):
    (tmp_path / "there").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="Too many levels"):
        read_record(tmp_path / "link")
    with pytest.raises(OSError, match="not a regular file"):
        read_record(tmp_path / "pipe")
    assert read_regular(tmp_path / "there", 3) == b"old"
    with pytest.raises(OSError, match="more than 0 MiB"):
        read_regular(tmp_path / "there", 2)


def test_chosen_hidden_folders_are_removed_and_others_stay(tmp_path):
    left, other = hidden_folder(tmp_path / "step-1"), hidden_folder(tmp_path / "step-10")
    assert left.parent == tmp_path
    remove_hidden(tmp_path, "step-1".__eq__)
    assert list(tmp_path.iterdir()) == [other]


def test_removed_folder_leaves_nothing(tmp_path):
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "file").write_bytes(b"1")
    remove_folder(tmp_path / "step-1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (errno.ENOSPC, "no space left on the disk of '/c' for the checkpoint 's'"),
        (errno.EACCES, "the checkpoint '/c/s' cannot be written: Permission denied"),
        (errno.EFBIG, "one of its files is larger than this process or the disk allows"),
    ],
)
def test_error_of_a_checkpoint_that_cannot_be_written_names_it(code, text):
    assert text in str(cannot_write(Path("/c/s"), OSError(code, os.strerror(code))))
