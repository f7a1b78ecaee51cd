"""Clusters: documents, paths, and everything that a file can have wrong."""

import json

import pytest
from panpipe.core.cluster import Cluster, Device, Link, cluster_json, fully_connected, read_cluster
from panpipe.core.errors import RequestError

CLUSTER = Cluster(
    (Device("g0", 100, "h100"), Device("g1", 200)),
    ("switch",),
    (Link("g0", "switch", 10.0, 0.25), Link("switch", "g1", 5.0, 0.5)),
)


def changed(tmp_path, change):
    data = json.loads(cluster_json(CLUSTER))
    change(data)
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(data))
    return path


def test_round_trip_gives_the_same_cluster_and_bytes(tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text(cluster_json(CLUSTER))
    assert read_cluster(path) == CLUSTER
    assert cluster_json(read_cluster(path)) == path.read_text()


def test_a_transfer_takes_all_latencies_and_the_slowest_rate():
    assert CLUSTER.transfer_s(0, 1, 20) == 0.75 + 20 / 5
    assert CLUSTER.transfer_s(1, 0, 20) == 0.75 + 20 / 5
    assert CLUSTER.transfer_s(1, 1, 20) == 0


def test_a_path_says_in_which_direction_it_crosses_each_link():
    first, second = CLUSTER.links
    assert CLUSTER.path(0, 1) == ((first, True), (second, True))
    assert CLUSTER.path(1, 0) == ((second, False), (first, False))


def test_the_path_of_least_latency_wins_then_that_of_fewest_links():
    links = (Link("a", "b", 1.0, 1.0), Link("a", "h", 9.0, 0.25), Link("h", "b", 9.0, 0.25))
    devices = (Device("a", 1), Device("b", 1))
    assert [link.bytes_per_s for link, _ in Cluster(devices, ("h",), links).path(0, 1)] == [9.0, 9.0]
    equal = (Link("a", "b", 1.0, 0.5), *links[1:])
    assert len(Cluster(devices, ("h",), equal).path(0, 1)) == 1


def test_fully_connected_gives_every_pair_a_link_of_its_own():
    cluster = fully_connected(4, 7, 2.0, 0.5)
    assert len(cluster.links) == 6
    assert {cluster.transfer_s(a, b, 4) for a in range(4) for b in range(4) if a != b} == {2.5}


def test_devices_without_a_path():
    cluster = Cluster((Device("a", 1), Device("b", 1)))
    with pytest.raises(RequestError, match=r"no link connects device 0 \('a'\) to 1 \('b'\): add one"):
        cluster.path(0, 1)


BAD = {
    "newer": (lambda d: d.update(format="panpipe.cluster/9"), "version 1"),
    "unknown field": (lambda d: d["devices"][0].update(colour=1), "colour"),
    "no devices": (lambda d: d.update(devices=[], links=[]), "no devices"),
    "twice": (lambda d: d.update(hubs=["g0"]), "'g0' stands twice"),
    "no memory": (lambda d: d["devices"][1].update(memory_bytes=0), "memory_bytes of 'g1' is 0"),
    "unknown end": (lambda d: d["links"][0].update(b="x"), "names 'x'"),
    "no rate": (lambda d: d["links"][0].update(bytes_per_s=0), "rate is above 0"),
    "negative latency": (lambda d: d["links"][0].update(latency_s=-1), "latency at least 0"),
    "missing": (lambda d: d["links"][0].pop("latency_s"), "latency_s"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_a_wrong_file_is_refused_in_one_line(tmp_path, change, message):
    with pytest.raises(RequestError, match=message) as caught:
        read_cluster(changed(tmp_path, change))
    assert "\n" not in str(caught.value)


def test_a_truncated_file(tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text(cluster_json(CLUSTER)[:-30])
    with pytest.raises(RequestError, match="not a whole JSON file"):
        read_cluster(path)
