"""The manifest of a checkpoint: its bytes, its hash, and folders that differ from it."""

import pytest
from panpipe.core.errors import RequestError
from panpipe.runtimes.checkpoint.durable_files import FileRecord, write_durable
from panpipe.runtimes.checkpoint.manifest import MANIFEST_NAME, check_file, check_listing, manifest_bytes, read_manifest

TENSORS, ITEMS = "tensors-00001-of-00001.safetensors", "items-00001-of-00001.json"


@pytest.fixture
def folder(tmp_path):
    files = {TENSORS: write_durable(tmp_path / TENSORS, [b"123"]), ITEMS: write_durable(tmp_path / ITEMS, [b"{}"])}
    (tmp_path / MANIFEST_NAME).write_bytes(manifest_bytes(120, files))
    return tmp_path


def test_manifest_has_steps_and_files(folder):
    found = read_manifest(folder)
    assert (found.steps, set(found.files), found.files[TENSORS].bytes) == (120, {TENSORS, ITEMS}, 3)
    assert found == read_manifest(folder)
    check_listing(folder, found)


def test_manifest_with_a_changed_byte_is_refused(folder):
    data = (folder / MANIFEST_NAME).read_bytes()
    (folder / MANIFEST_NAME).write_bytes(data.replace(b'"steps": 120', b'"steps": 121'))
    with pytest.raises(RequestError, match="is damaged: its hash differs"):
        read_manifest(folder)
    (folder / MANIFEST_NAME).write_bytes(data[:-1])
    with pytest.raises(RequestError, match="is damaged"):
        read_manifest(folder)


def test_manifest_of_another_format_is_refused_by_its_format(folder):
    data = (folder / MANIFEST_NAME).read_bytes().replace(b"panpipe.checkpoint/1", b"panpipe.checkpoint/9")
    (folder / MANIFEST_NAME).write_bytes(data)
    with pytest.raises(RequestError, match=r"panpipe\.checkpoint/9"):
        read_manifest(folder)


def test_manifest_that_names_another_file_is_refused(tmp_path):
    (tmp_path / MANIFEST_NAME).write_bytes(manifest_bytes(1, {"../tensors": FileRecord(1, "0" * 32)}))
    with pytest.raises(RequestError, match=r"names '\.\./tensors', which is not a file of a checkpoint"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(("steps", "size"), [(-1, 1), (1, -1), (1 << 63, 1), (1, 1 << 63)])
def test_manifest_with_sizes_out_of_range_is_refused(steps, size, tmp_path):
    (tmp_path / MANIFEST_NAME).write_bytes(manifest_bytes(steps, {TENSORS: FileRecord(size, "0" * 32)}))
    with pytest.raises(RequestError):
        read_manifest(tmp_path)


def test_folder_without_a_manifest_is_refused_and_one_of_dcp_by_name(tmp_path):
    with pytest.raises(RequestError, match="there is no whole checkpoint"):
        read_manifest(tmp_path)
    (tmp_path / ".metadata").write_bytes(b"")
    with pytest.raises(RequestError, match=r"checkpoint of torch\.distributed\.checkpoint"):
        read_manifest(tmp_path)


def test_folder_that_differs_from_its_manifest_is_refused_by_the_file(folder):
    manifest = read_manifest(folder)
    (folder / "notes").write_bytes(b"")
    with pytest.raises(RequestError, match="has 'notes', which is not in its manifest"):
        check_listing(folder, manifest)
    (folder / "notes").unlink()
    (folder / TENSORS).write_bytes(b"12")
    with pytest.raises(RequestError, match="is truncated: it has 2 bytes and the manifest has 3"):
        check_listing(folder, manifest)
    (folder / TENSORS).write_bytes(b"1234")
    with pytest.raises(RequestError, match="is longer than when it was written"):
        check_listing(folder, manifest)
    (folder / TENSORS).unlink()
    with pytest.raises(RequestError, match="is missing"):
        check_listing(folder, manifest)
    (folder / TENSORS).symlink_to(folder / ITEMS)
    with pytest.raises(RequestError, match="is a link, or not a regular file"):
        check_listing(folder, manifest)


def test_file_of_the_same_size_with_another_hash_is_refused(tmp_path):
    check_file(tmp_path, TENSORS, FileRecord(3, "a"), FileRecord(3, "a"))
    with pytest.raises(RequestError, match="was changed since it was written"):
        check_file(tmp_path, TENSORS, FileRecord(3, "a"), FileRecord(3, "b"))
