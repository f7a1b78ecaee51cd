"""Arenas and the copies of a device: what they move, in which order, and how they fail."""

import os
import resource
import threading
import time

import pytest
import torch
from panpipe.core.errors import OffloadError, RequestError
from panpipe.runtimes.offload.arena import FileArena, MemoryArena
from panpipe.runtimes.offload.copies import Part, ThreadCopies
from panpipe.runtimes.offload.tier import OffloadTier

ARENAS = {"memory": lambda folder, size: MemoryArena(size), "file": FileArena}


def data(size: int, first: int = 0) -> torch.Tensor:
    return (torch.arange(size) + first).to(torch.uint8)


@pytest.fixture(params=ARENAS)
def arena(request, tmp_path):
    made = ARENAS[request.param](tmp_path, 9 << 20)
    yield made
    made.close()


def test_arena_reads_what_was_written(arena):
    one, other = data(5 << 20), data(3 << 20, 7)
    arena.write(0, one)
    arena.write(6 << 20, other)
    found = torch.empty_like(one), torch.empty_like(other)
    arena.read(0, found[0])
    arena.read(6 << 20, found[1])
    assert torch.equal(found[0], one)
    assert torch.equal(found[1], other)


@pytest.mark.parametrize("separate", [False, True])
def test_copies_bring_back_what_went_out(arena, separate):
    copies = ThreadCopies(arena, separate=separate)
    wanted = [data(5 << 20, number) for number in range(3)]
    for source in wanted:
        parts = [Part(source[: 2 << 20], 0), Part(source[2 << 20 :], 4 << 20)]
        out = copies.out(parts)
        target = torch.empty_like(source)
        back = copies.back([Part(target[: 2 << 20], 0), Part(target[2 << 20 :], 4 << 20)], out)
        back.wait()
        out.wait()
        assert torch.equal(target, source)
        assert out.started_ns <= out.ended_ns <= back.ended_ns
    copies.close()


def test_copies_hold_no_storage_once_they_are_done(arena):
    copies = ThreadCopies(arena)
    source = data(1 << 20)
    copy = copies.out([Part(source, 0)])
    copy.wait()
    assert copy.parts == ()
    copies.close()


def test_copies_keep_to_a_rate(tmp_path):
    copies = ThreadCopies(MemoryArena(8 << 20), bytes_per_s=80 << 20)
    copy = copies.out([Part(data(8 << 20), 0)])
    begun = time.perf_counter()
    copy.wait()
    assert time.perf_counter() - begun >= 0.09
    copies.close()


def test_a_reload_of_bytes_that_did_not_arrive_fails_too(monkeypatch):
    def full(offset, source):
        raise OSError(28, "No space left on device")

    arena = MemoryArena(64)
    monkeypatch.setattr(arena, "write", full)
    copies = ThreadCopies(arena)
    out = copies.out([Part(data(64), 0)])
    back = copies.back([Part(data(64), 0)], out)
    for copy in (out, back):
        with pytest.raises(OffloadError, match="No space left on device"):
            copy.wait()
    copies.close()


def test_closing_ends_the_threads():
    before = threading.active_count()
    copies = ThreadCopies(MemoryArena(64), separate=True)
    assert threading.active_count() == before + 2
    copies.close()
    assert threading.active_count() == before


def test_file_has_no_name_from_the_start_and_its_blocks_are_reserved(tmp_path):
    arena = FileArena(tmp_path, 1 << 20)
    assert not list(tmp_path.iterdir())
    assert os.fstat(arena._file).st_blocks * 512 >= 1 << 20
    arena.close()


def test_a_folder_without_space_is_refused_in_one_line(tmp_path):
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with pytest.raises(RequestError, match="name a folder with more space, or offload less") as refused:
        FileArena(tmp_path, 2 * free + (1 << 50))
    assert "\n" not in str(refused.value)


def test_a_file_that_may_not_grow_is_refused(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(RequestError, match="the saved tensors of a device take 1048576 bytes in"):
            FileArena(tmp_path, 1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"to": "tape"}, "offload_to is 'tape': give 'host', 'disk'"),
        ({"to": "/no/such/folder"}, "offload_to is '/no/such/folder': give 'host', 'disk'"),
        ({"host_memory": -1}, "host is -1: give bytes, at least 0"),
    ],
)
def test_tiers_that_cannot_be_are_refused(options, said):
    with pytest.raises(RequestError, match=said) as refused:
        OffloadTier(**options)
    assert "\n" not in str(refused.value)
