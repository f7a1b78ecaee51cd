"""Memory that is left: of the machine, of its container, and under a limit on data."""

import pathlib
import resource

import pytest
from panpipe.runtimes.devices import available_memory
from panpipe.runtimes.devices.available_memory import (
    container_bytes,
    lockable_bytes,
    machine_bytes,
)


@pytest.mark.parametrize(
    ("limit", "expected"), [("1048576\n", 1 << 20), ("max\n", None), ("9" * 30, None), (None, None)]
)
def test_machine_has_what_its_container_may_use(monkeypatch, limit, expected):
    def read(path, encoding):
        if limit is None:
            raise OSError
        return limit

    monkeypatch.setattr(pathlib.Path, "read_text", read)
    monkeypatch.setattr(available_memory.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 20}.__getitem__)
    assert machine_bytes() == (expected or 1 << 32)


@pytest.mark.parametrize(
    "files",
    [
        {"/proc/self/cgroup": "0::/job/rank\n", "/sys/fs/cgroup/job/memory.max": "4096\n",
         "/sys/fs/cgroup/job/rank/memory.max": "max\n"},
        {"/proc/self/cgroup": "5:cpu:/\n4:memory:/job\n0::/\n",
         "/sys/fs/cgroup/memory/job/memory.limit_in_bytes": "4096\n",
         "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"},
        {"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/memory.max": "4096\n"},
    ],
)  # fmt: skip
def test_limits_of_control_groups_of_both_versions_and_of_those_around_them_are_found(monkeypatch, files):
    def read(path, encoding):
        if str(path) not in files:
            raise OSError
        return files[str(path)]

    monkeypatch.setattr(pathlib.Path, "read_text", read)
    assert container_bytes() == 4096
    files = {name: text for name, text in files.items() if "4096" not in text}
    assert container_bytes() in (None, 9223372036854771712)


@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="Linux counts locked memory")
def test_locked_memory_has_the_limit_of_the_process(monkeypatch):
    for soft, left in ((resource.RLIM_INFINITY, None), (1 << 20, 1 << 20)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert lockable_bytes() == left
