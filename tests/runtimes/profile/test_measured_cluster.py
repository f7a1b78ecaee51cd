"""Clusters measured on the devices at hand: links inside a host and between hosts."""

import time

import torch
from panpipe.backends import memcpy
from panpipe.backends.kind import BackendKind
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.profile.measured_cluster import measured_cluster

NETWORK_S = 0.01


class Slow(memcpy.MemcpyBackend):
    """Devices 0 and 1 are on one host, 2 and 3 on another one: messages between the two take longer."""

    def send(self, tensors, peer):
        if self.device // 2 != peer // 2:
            time.sleep(NETWORK_S)
        return super().send(tensors, peer)


def slow(devices):
    exchange = memcpy.Exchange(devices)
    return [Slow(exchange, device) for device in range(devices)]


def test_links_between_hosts_are_measured_and_not_taken_from_those_inside():
    team = ThreadTeam(4, BackendKind("slow", "for tests", threads=slow))
    cluster = measured_cluster(team, torch.device("cpu"), lambda device: f"host{device // 2}")
    latency = {(int(link.a[-1]), int(link.b[-1])): link.latency_s for link in cluster.links}
    assert len(latency) == 6
    for (a, b), seconds in latency.items():
        assert (seconds > NETWORK_S / 2) == (a // 2 != b // 2), (a, b)
