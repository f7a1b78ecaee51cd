"""Saves that are interrupted by SIGKILL, or by a full disk, at any byte: the checkpoint before is whole."""

import errno
import os
import random
import resource
import signal
import sys
from pathlib import Path

import panpipe
import pytest
import torch
from panpipe.runtimes.checkpoint.reading import CheckpointReader, Parts
from panpipe.runtimes.checkpoint.writing import Save, begin_save, latest_checkpoint
from panpipe.runtimes.launch.team import ONE_PROCESS

BYTES = 40_000


def save(folder, number, keep=None):
    """Write a checkpoint whose values are its number."""
    path = Path(folder) / f"step-{number}"
    tensors = {f"model.w{i}": torch.full((BYTES // 8,), float(number)) for i in range(2)}
    Save(path, begin_save(path), Parts(tensors, {"progress.steps": number}), number, keep, 1).run(ONE_PROCESS)


def last(folder):
    """The number of the last checkpoint, all of whose files are compared with their hashes."""
    reader = CheckpointReader(latest_checkpoint(folder))
    found = reader.whole()
    number = found.items["progress.steps"]
    assert all(torch.equal(tensor, torch.full_like(tensor, number)) for tensor in found.tensors.values())
    return number


def in_a_fork(work):
    """The exit code of a fork of this process that does some work; negative for a signal."""
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            work()
            os._exit(0)
        except BaseException:
            os._exit(77)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at_byte(byte, work):
    """Work in a process that the kernel kills when a file of it reaches a size."""

    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (byte, resource.RLIM_INFINITY))
        work()

    return in_a_fork(limited)


def killed_at_event(number, work):
    """Work in a process that kills itself when it opens, renames or removes a file for the nth time."""

    def hooked():
        left = [number]

        def count(event, _):
            if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.scandir"):
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        work()

    return in_a_fork(hooked)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_kill_at_any_byte_leaves_the_checkpoint_before(tmp_path):
    save(tmp_path, 1)
    draw = random.Random(0)
    for byte in (0, 1, 100, 500, BYTES, *(draw.randrange(BYTES) for _ in range(5))):
        assert killed_at_byte(byte, lambda: save(tmp_path, 2)) == -signal.SIGXFSZ
        assert last(tmp_path) == 1
        assert len(list(tmp_path.glob(".partial-*"))) == 1  # that of the last attempt alone
    save(tmp_path, 2)
    assert last(tmp_path) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2"]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_kill_before_any_change_of_a_folder_leaves_a_whole_checkpoint(tmp_path):
    """With keep=1, so that the kill also falls into the removal of the checkpoint before."""
    number, ended = 1, []
    save(tmp_path, number)
    for event in range(100):
        code = killed_at_event(event, lambda: save(tmp_path, number + 1, keep=1))  # noqa: B023 - called at once
        assert last(tmp_path) in (number, number + 1)
        ended.append(code)
        number = last(tmp_path)
        if code == 0:
            break
    assert ended[-1] == 0
    assert set(ended[:-1]) == {-signal.SIGKILL}
    assert len(ended) > 10
    save(tmp_path, number + 1, keep=1)
    assert [path.name for path in tmp_path.glob("step-*")] == [f"step-{number + 1}"]


class FullDisk:
    """A file of a disk with space for some bytes."""

    def __init__(self, file, left):
        self._file, self._left = file, left

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()

    def write(self, data):
        size = min(len(data), self._left[0])
        self._left[0] -= size
        self._file.write(data[:size])
        if size < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def flush(self):
        self._file.flush()


def test_a_full_disk_is_reported_and_nothing_is_left(tmp_path, monkeypatch):
    save(tmp_path, 1)
    opened = os.fdopen
    for space in (0, 10, 1000, BYTES, BYTES + 400):
        left = [space]
        monkeypatch.setattr(os, "fdopen", lambda *a, left=left, **k: FullDisk(opened(*a, **k), left))
        with pytest.raises(panpipe.RequestError, match=r"\Ano space left on the disk of '[^\n]*' for the checkpoint "):
            save(tmp_path, 2)
        monkeypatch.undo()
        assert last(tmp_path) == 1
        assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_a_file_size_limit_and_a_read_only_folder_are_reported_in_a_line(tmp_path):
    save(tmp_path, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(panpipe.RequestError, match=r"\Athe checkpoint '[^\n]*' cannot be written: one of its"):
            save(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
