"""Writing a file: whole or not at all, without links, with the user's permissions."""

import os
import stat

import pytest
from panpipe.core.files.write import replace_file, write_text


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
