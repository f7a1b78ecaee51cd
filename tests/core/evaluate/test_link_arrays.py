"""Links as arrays: only those are kept that messages of several pairs cross, or one message twice."""

from panpipe.core.cluster.cluster import Cluster, Device, fully_connected
from panpipe.core.cluster.routing import Link
from panpipe.core.evaluate.contended import link_arrays, no_links


def crossed(links, a, b, devices):
    pair = a * devices + b
    return set(links.link[links.first[pair] : links.first[pair + 1]].tolist())


def test_links_of_one_pair_are_left_out():
    links = link_arrays(fully_connected(3, 10**9, 1e9, 0.0), [[0, 1, 2]])
    assert len(links.link) == 0


def test_ports_of_a_switch_are_shared_by_direction():
    devices = tuple(Device(f"d{i}", 10**9) for i in range(3))
    ports = tuple(Link(one.name, "switch", 1e9, 0.0) for one in devices)
    links = link_arrays(Cluster(devices, ("switch",), ports), [[0, 1, 2]])
    out = crossed(links, 0, 1, 3) & crossed(links, 0, 2, 3)
    into = crossed(links, 0, 2, 3) & crossed(links, 1, 2, 3)
    assert len(out) == len(into) == 1
    assert out != into
    assert not crossed(links, 0, 1, 3) & crossed(links, 1, 0, 3)
    assert [links.capacity[n] for n in out] == [1e9]


def test_replicas_share_what_both_cross():
    devices = tuple(Device(f"d{i}", 10**9) for i in range(4))
    nodes = [Link(f"d{i}", f"node{i % 2}", 1e12, 0.0) for i in range(4)]
    cluster = Cluster(devices, ("node0", "node1"), (*nodes, Link("node0", "node1", 1e9, 0.0)))
    both = link_arrays(cluster, [[0, 1], [2, 3]])
    crossings = both.link[both.first[1] : both.first[2]].tolist()  # from position 0 to position 1
    assert [both.capacity[n] for n in crossings] == [1e9, 1e9]
    assert crossings[0] == crossings[1]
    assert len(link_arrays(cluster, [[0, 1]]).link) == 0


def test_no_links_have_an_entry_for_each_pair():
    links = no_links(3)
    assert links.first.tolist() == [0] * 10
    assert len(links.link) == len(links.capacity) == 0
