"""The block of bytes of a device on its host: in memory, and in a file without a name."""

import errno
import os

import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.runtimes.offload import arena
from panpipe.runtimes.offload.arena import FileArena, MemoryArena, chunks


@pytest.fixture(params=["memory", "file"])
def block(request, tmp_path):
    made = MemoryArena(64) if request.param == "memory" else FileArena(tmp_path, 64)
    yield made
    made.close()


def test_bytes_are_read_where_they_were_written(block):
    assert block.bytes == 64
    first, second = torch.arange(16, dtype=torch.uint8), torch.full((16,), 7, dtype=torch.uint8)
    block.write(0, first)
    block.write(48, second)
    found = [torch.zeros(16, dtype=torch.uint8) for _ in range(2)]
    block.read(48, found[0])
    block.read(0, found[1])
    assert (found[0].tolist(), found[1].tolist()) == ([7] * 16, [*range(16)])


def test_file_has_no_name_and_its_blocks_are_reserved(tmp_path):
    before = os.statvfs(tmp_path).f_bfree
    block = FileArena(tmp_path, 1 << 20)
    assert os.listdir(tmp_path) == []
    assert os.fstat(block._file).st_size == 1 << 20
    assert os.fstat(block._file).st_blocks * 512 >= 1 << 20 or os.statvfs(tmp_path).f_bfree <= before
    block.close()
    block.close()  # may be called again


def test_reading_behind_the_end_of_a_file_is_an_error(tmp_path):
    block = FileArena(tmp_path, 8)
    with pytest.raises(OSError, match="the file ends before byte 8"):
        block.read(4, torch.zeros(8, dtype=torch.uint8))
    block.close()


def test_folder_without_space_or_without_rights_is_refused(tmp_path, monkeypatch):
    with pytest.raises(RequestError, match=r"no file can be created in .*: name a folder that can be written"):
        FileArena(tmp_path / "none", 8)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(arena, "_reserve", full)
    with pytest.raises(RequestError, match=r"take 8 bytes in .*No space left on device; \d+ bytes are free"):
        FileArena(tmp_path, 8)


def test_parts_of_a_copy_cover_it():
    assert chunks(0) == []
    assert chunks(10) == [(0, 10)]
    assert chunks((4 << 20) + 1) == [(0, 4 << 20), (4 << 20, 1)]
