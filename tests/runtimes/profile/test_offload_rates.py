"""Measured rates of copies to the host, and the cluster that has them."""

import torch
from panpipe.core.cluster.cluster import fully_connected
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.offload.tier import OffloadTier
from panpipe.runtimes.profile import offload_rates
from panpipe.runtimes.profile.offload_rates import host_rates, with_hosts

CPU = torch.device("cpu")


def test_a_rate_is_no_higher_than_that_of_the_copies():
    tier = OffloadTier(bytes_per_s=1e9)
    for rate in host_rates(tier, CPU, 0, 4 << 20):
        assert 1e6 < rate <= 1e9


def test_devices_reach_their_host_and_their_messages_do_not_pass_it(tmp_path, monkeypatch):
    monkeypatch.setattr(offload_rates, "SIZE", 1 << 16)
    plain = fully_connected(2, 10**9, 1e9, 1e-5)
    team = ThreadTeam(2)
    found = with_hosts(plain, team, dict.fromkeys(team.local, CPU), OffloadTier(tmp_path, host_memory=1234))
    for device in range(2):
        ((link, outward),) = found.host_path(device)
        assert outward
        assert link.rate(True) > 0
        assert link.rate(False) > 0
    assert [(hub.kind, hub.memory_bytes) for hub in found.hubs] == [("host", 1234)]
    assert found.path(0, 1) == plain.path(0, 1)
    team.close()
