"""Measured operators and links."""

import time

import torch
from panpipe.backends import memcpy
from panpipe.backends.kind import BackendKind
from panpipe.core.analytic.single_operator import LoneOperator
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.profile.measured_cluster import measured_cluster
from panpipe.runtimes.profile.operator_profile import profile_operators

from ...support.cuts import captured_once
from ...support.models import CASES

# Clusters measured on the devices at hand: links inside a host and between hosts.


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
    cluster = measured_cluster(team, dict.fromkeys(range(4), torch.device("cpu")), lambda device: f"host{device // 2}")
    latency = {(int(link.a[-1]), int(link.b[-1])): link.latency_s for link in cluster.links}
    assert len(latency) == 6
    for (a, b), seconds in latency.items():
        assert (seconds > NETWORK_S / 2) == (a // 2 != b // 2), (a, b)


# Operators' times: those that do the same work have one.


def test_equal_operators_have_one_time_and_all_have_their_saved_bytes():
    case = CASES["token-weighted"]  # of two equal layers
    operators = captured_once(case, torch.float32, 4, 2)
    model = case.model(torch.float32)
    leaves = [leaf[:2] for leaf in torch.utils._pytree.tree_leaves(case.batch(4, torch.float32))]
    graph = profile_operators(
        operators, dict(model.named_parameters()), dict(model.named_buffers()), leaves, repeats=2
    )  # fmt: skip
    times = {}
    for node in graph.nodes:
        key = LoneOperator(operators, node.name).key
        found = node.forward_s, node.backward_input_s, node.backward_weight_s
        assert times.setdefault(key, found) == found
    assert len(times) < len(graph.nodes)
    assert all(node.forward_s > 0 for node in graph.nodes)
    layers = [[node.saved_bytes for node in graph.nodes if f".{i}." in node.name] for i in range(2)]
    assert layers[0] == layers[1]
    assert sum(layers[0]) > 0
