"""Measured rates of copies to the host, and the cluster that has them."""

import threading

import pytest
import torch
from panpipe.core.cluster.cluster import fully_connected
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.offload.host_memory import HostMemory
from panpipe.runtimes.offload.tier import OffloadTier
from panpipe.runtimes.profile import offload_rates
from panpipe.runtimes.profile.offload_rates import MICROBATCHES, SMALLEST, STORAGES, computing, host_rates, with_hosts

CPU = torch.device("cpu")
COPIES = STORAGES * MICROBATCHES


@pytest.fixture
def reserved(monkeypatch):
    """Sizes of the arenas that are reserved."""
    sizes, plain = [], HostMemory.reserve
    monkeypatch.setattr(HostMemory, "reserve", lambda self, size: (sizes.append(size), plain(self, size)))
    return sizes


def test_a_rate_is_no_higher_than_that_of_the_copies():
    tier = OffloadTier(bytes_per_s=1e9)
    for rate in host_rates(tier, CPU, 0, storage=1 << 18):
        assert 1e6 < rate <= 1e9


def test_copies_take_no_more_than_may_be_used(reserved):
    for usable in (COPIES << 17, 0):
        host_rates(OffloadTier(), CPU, 0, usable)
    assert reserved == [COPIES << 17, COPIES * SMALLEST]


def test_a_device_on_the_cpu_computes_during_the_copies(monkeypatch):
    seen, plain = set(), torch.mm

    def product(*matrices):
        seen.add(threading.current_thread().name)
        return plain(*matrices)

    monkeypatch.setattr(torch, "mm", product)
    host_rates(OffloadTier(), CPU, 0, storage=1 << 20)
    assert seen == {"panpipe computes during copies"}
    assert not seen & {thread.name for thread in threading.enumerate()}


def test_a_failed_copy_ends_the_computing_thread():
    with pytest.raises(OSError, match="no space"), computing(CPU):
        raise OSError("no space")
    assert "panpipe computes during copies" not in {thread.name for thread in threading.enumerate()}


@pytest.fixture
def team():
    team = ThreadTeam(2)
    yield team
    team.close()


def test_devices_reach_their_host_and_their_messages_do_not_pass_it(tmp_path, team):
    plain = fully_connected(2, 10**9, 1e9, 1e-5)
    found = with_hosts(plain, team, dict.fromkeys(team.local, CPU), OffloadTier(tmp_path, host_memory=1 << 20))
    for device in range(2):
        ((link, outward),) = found.host_path(device)
        assert outward
        assert link.rate(True) > 0
        assert link.rate(False) > 0
    assert [(hub.kind, hub.name, hub.memory_bytes) for hub in found.hubs] == [("host", "host 0 (host_memory)", 1 << 20)]
    assert found.path(0, 1) == plain.path(0, 1)


def test_what_may_be_used_is_read_on_all_devices_before_any_of_them_copies(monkeypatch, team):
    order, lock = [], threading.Lock()

    def note(what, value):
        with lock:
            order.append(what)
        return value

    monkeypatch.setattr(offload_rates, "usable_bytes", lambda tier: note("usable", (1000, "host_memory")))
    monkeypatch.setattr(offload_rates, "host_rates", lambda *arguments: note(arguments[-1], (1e9, 1e9)))
    with_hosts(fully_connected(2, 10**9, 1e9, 1e-5), team, dict.fromkeys(team.local, CPU), OffloadTier())
    assert order == ["usable", "usable", 500, 500]
