"""What a rank leaves: it counts if it was there after the reader's process had started, and is nobody else's."""

import os
import subprocess
import sys
import time

import pytest
from panpipe.runtimes.watch import presence_file
from panpipe.runtimes.watch.presence_file import NOBODY, LastSeen, PresenceFiles

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone has sockets without a file")

JOB = "127.0.0.1:1"
WRITE = f"""
from panpipe.runtimes.watch.presence_file import PresenceFiles
PresenceFiles({JOB!r}, 1).begin()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(presence_file.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(presence_file, "_RANK_PROCESSES", set())
    return tmp_path / f"panpipe-{os.getuid()}"


def written(because_of=NOBODY):
    files = PresenceFiles(JOB, 1)
    files.begin()
    files.write(because_of)
    return files


def test_rank_that_was_there_after_the_reader_had_started_is_seen(folder):
    reader = PresenceFiles(JOB, 0)
    assert reader.of(1) is None
    subprocess.run([sys.executable, "-c", WRITE], env={**os.environ, "TMPDIR": str(folder.parent)}, check=True)
    found = reader.of(1)
    assert found.because_of == NOBODY
    assert 0 <= time.clock_gettime(time.CLOCK_BOOTTIME) - found.at_s < 60
    assert PresenceFiles("127.0.0.1:2", 0).of(1) is None


def test_rank_of_a_job_before_the_reader_had_started_is_not_seen(folder):
    written()
    time.sleep(0.05)  # the start of a process is known to 1/100 s
    reads = f"from panpipe.runtimes.watch.presence_file import PresenceFiles; print(PresenceFiles({JOB!r}, 0).of(1))"
    done = subprocess.run(
        [sys.executable, "-c", reads], env={**os.environ, "TMPDIR": str(folder.parent)}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert done.stdout == "None\n"


def test_rank_of_the_previous_job_of_this_process_is_not_seen(folder):
    PresenceFiles(JOB, 0)
    written()
    assert PresenceFiles(JOB, 2).of(1) is None


def test_rank_leaves_the_number_of_the_rank_because_of_which_it_ends(folder):
    reader = PresenceFiles(JOB, 0)
    written(because_of=2)
    assert reader.of(1).because_of == 2


def test_ranks_that_have_met_leave_nothing(folder):
    reader, files = PresenceFiles(JOB, 0), written()
    assert isinstance(reader.of(1), LastSeen)
    files.end()
    assert reader.of(1) is None
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("hostile", ["link", "pipe", "short", "folder"])
def test_what_others_put_in_the_place_of_a_file_is_neither_read_nor_written(folder, hostile):
    reader, files = PresenceFiles(JOB, 0), written()
    [path] = folder.iterdir()
    content = path.read_bytes()
    path.unlink()
    other = folder.parent / "other"
    other.write_bytes(content)
    if hostile == "link":
        path.symlink_to(other)
    elif hostile == "pipe":
        os.mkfifo(path)
    elif hostile == "short":
        path.write_bytes(content[:-1])
    else:
        path.mkdir()
    assert reader.of(1) is None
    files.close()
    written(because_of=2)
    assert other.read_bytes() == content


@pytest.mark.parametrize("hostile", ["link", "open to others", "file"])
def test_folder_that_others_can_use_is_not_used(folder, hostile):
    if hostile == "link":
        (folder.parent / "own").mkdir(mode=0o700)
        folder.symlink_to(folder.parent / "own")
    elif hostile == "file":
        folder.touch()
    else:
        folder.mkdir()
        folder.chmod(0o755)
    files = written()
    assert files.of(1) is None
    assert [path for path in folder.parent.rglob("*") if path.is_file() and path != folder] == []


def test_files_of_jobs_that_never_met_are_removed_after_a_day(folder):
    written().close()
    [path] = folder.iterdir()
    before = time.time() - presence_file._KEPT_S - 1
    os.utime(path, (before, before))
    other = PresenceFiles("127.0.0.1:2", 0)
    other.begin()
    assert not path.exists()
