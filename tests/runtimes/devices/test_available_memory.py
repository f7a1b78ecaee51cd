"""Memory that is left: of the machine, of its container, and under a limit on data."""

import pathlib

import pytest
from panpipe.runtimes.devices import available_memory
from panpipe.runtimes.devices.available_memory import bytes_left, data_bytes, machine_bytes


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


@pytest.mark.parametrize(("limit", "left"), [(None, None), (1000, 570), (300, 0)])
def test_most_of_what_a_limit_on_data_leaves_is_used(monkeypatch, limit, left):
    monkeypatch.setattr(available_memory, "data_limit", lambda: limit)
    monkeypatch.setattr(available_memory, "data_bytes", lambda: 400)
    assert bytes_left() == left


@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="Linux counts data")
def test_data_of_this_process_grows_with_what_it_allocates():
    before = data_bytes()
    held = bytearray(64 << 20)
    assert data_bytes() - before >= len(held) // 2
