"""Clusters by name: what is built, the paths through it, and wrong names."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from panpipe.core.cluster.catalog import catalogue, device_type, find_cluster
from panpipe.core.cluster.routing import path_rate, reverse
from panpipe.core.errors import RequestError


def way(cluster, src, dst):
    """Names of the places from one device to another."""
    here, names, memories = cluster.devices[src].name, [], set(cluster.memories.values())
    for link, forward in (hop for hop in cluster.path(src, dst) if hop[0] not in memories):
        assert here == (link.a if forward else link.b)
        here = link.b if forward else link.a
        names.append(here)
    assert here == cluster.devices[dst].name
    return " ".join(names[:-1])


def rate(cluster, src, dst):
    return min(link.bytes_per_s for link, _ in cluster.path(src, dst)) / 1e9


def kinds(cluster):
    found = {}
    for hub in cluster.hubs:
        found[hub.kind] = found.get(hub.kind, 0) + 1
    return found


def test_rtx3090_pairs_are_bridged_and_others_staged_through_the_host():
    cluster = find_cluster("8xRTX3090")
    assert (way(cluster, 0, 1), rate(cluster, 0, 1)) == ("", 48)
    assert (way(cluster, 1, 2), rate(cluster, 1, 2)) == ("pcie1 host0 pcie2", 24)
    assert (way(cluster, 0, 7), rate(cluster, 0, 7)) == ("pcie0 host0 host1 pcie7", 16)
    assert cluster.transfer_s(1, 2, 24e9) == pytest.approx(1 + 14e-6)


def test_a100_40gb_uses_nvswitch_ports_and_pairs_share_a_pcie_switch():
    cluster = find_cluster("8xA100-40GB")
    assert [device.memory_bytes for device in cluster.devices] == [39_000_000_000] * 8
    assert {way(cluster, a, b) for a in range(8) for b in range(8) if a != b} == {"nvswitch"}
    assert rate(cluster, 0, 7) == 240
    assert cluster.transfer_s(0, 7, 240e9) == pytest.approx(1 + 12e-6)
    assert kinds(cluster) == {"switch": 1, "pcie": 4, "host": 2}
    assert [cluster.host_path(gpu)[0][0].b for gpu in range(8)] == [f"pcie{gpu // 2}" for gpu in range(8)]
    assert [cluster.host_path(gpu)[1][0].b for gpu in (0, 3, 4, 7)] == ["host0", "host0", "host1", "host1"]


def test_gh200_copies_to_its_host_and_back_at_different_rates():
    cluster = find_cluster("4xGH200")
    out = cluster.host_path(1)
    assert (path_rate(out), path_rate(reverse(out))) == (170e9, 411e9)
    assert [cluster.host_of(gpu).name for gpu in range(4)] == [f"host{gpu}" for gpu in range(4)]
    assert cluster.host_of(0).memory_bytes == 480_000_000_000


def test_nodes_communicate_over_the_nic_of_the_pcie_switch_and_its_rail():
    cluster = find_cluster("4x8xA100-80GB")
    assert way(cluster, 2, 10) == "node0.pcie1 node0.nic1 rail1 node1.nic1 node1.pcie1"
    assert way(cluster, 3, 11) == way(cluster, 2, 10)
    assert way(cluster, 0, 31) == "node0.pcie0 node0.nic0 rail0 spine rail3 node3.nic3 node3.pcie3"
    assert rate(cluster, 0, 31) == 23.5
    assert cluster.transfer_s(2, 10, 0) == pytest.approx(22e-6)
    assert kinds(cluster) == {"switch": 4 + 4 + 1, "pcie": 16, "host": 8, "nic": 16}
    spine = next(link for link in cluster.links if link.b == "spine")
    assert spine.bytes_per_s == 4 * 23.5e9


@pytest.mark.parametrize("name", catalogue().clusters)
def test_every_named_cluster_builds_and_all_of_it_is_connected(name):
    cluster = find_cluster(name)
    last = len(cluster.devices) - 1
    assert cluster.path(0, last)
    assert device_type(cluster, last).usable_bytes == cluster.devices[last].memory_bytes
    for device in (0, last):
        assert cluster.host_path(device)


@given(
    st.sampled_from([name for name in catalogue().nodes if name != "any"]),
    st.integers(1, 3),
    st.integers(1, 8),
    st.integers(1, 9),
    st.integers(1, 4),
    st.booleans(),
)
@settings(max_examples=40)
def test_any_size_of_any_node_is_connected_and_staged_where_it_must_be(kind, nodes, gpus, nics, at_a_switch, rails):
    parameters = f"nics={nics},gpus_per_pcie_switch={at_a_switch},rails={'yes' if rails else 'no'}"
    gpus = min(gpus, catalogue().nodes[kind].gpus)
    cluster = find_cluster(f"{nodes}x{gpus}x{kind}:{parameters}")
    assert len(cluster.devices) == nodes * gpus
    assert sum(hub.kind == "nic" for hub in cluster.hubs) == (nodes * nics if nodes > 1 else 0)
    kinds = {hub.name: hub.kind for hub in cluster.hubs}
    for src in (0, len(cluster.devices) - 1):
        assert cluster.host_of(src).kind == "host"
        for dst in range(len(cluster.devices)):
            if src == dst:
                continue
            passed = [kinds[name] for name in way(cluster, src, dst).split()]
            assert not passed or {"host", "switch"} & set(passed)
            assert ("nic" in passed) == (src // gpus != dst // gpus)


def test_parameters_change_the_nodes():
    slow = find_cluster("2x8xH100:nics=2,nic=nic-100g,rails=no,gpus_per_pcie_switch=4")
    assert kinds(slow) == {"switch": 3, "pcie": 4, "host": 4, "nic": 4}
    assert way(slow, 7, 8) == "node0.pcie1 node0.nic1 network node1.nic0 node1.pcie0"
    assert rate(slow, 7, 8) == 12
    bare = find_cluster("8xA100-40GB:interconnect=none,sockets=1")
    assert way(bare, 0, 7) == "pcie0 host0 pcie3"
    narrow = find_cluster("4x8xA100-80GB:oversubscription=4")
    assert next(link for link in narrow.links if link.b == "spine").bytes_per_s == 23.5e9


def test_different_devices_share_a_network():
    cluster = find_cluster("4xH100+4xA100-80GB")
    assert [device.type for device in cluster.devices] == ["H100"] * 4 + ["A100-80GB"] * 4
    assert [device_type(cluster, device).name for device in (0, 7)] == ["H100", "A100-80GB"]
    assert way(cluster, 0, 1) == "node0.nvswitch"
    assert way(cluster, 0, 4) == "node0.pcie0 node0.nic0 rail0 node1.nic0 node1.pcie0"
    assert rate(cluster, 0, 4) == 23.5
    assert way(cluster, 3, 7).split()[2:5] == ["rail3", "spine", "rail1"]


BAD = {
    "thousands of digits": (f"{'9' * 5000}x8xH100", "there is no cluster"),
    "thousands of digits of workers": (f"cpu:{'9' * 5000}", "has no number of workers"),
    "unknown type": ("8xH1000", "no device type 'H1000': did you mean H100"),
    "unknown name": ("8A100-40GB", "no cluster '8A100-40GB'.*did you mean 8xA100-40GB"),
    "too many": ("16xH100", "a node, which has 8: write 2x8xH100"),
    "no devices": ("0xH100", "gpus of 1x0xH100 is 0"),
    "too many devices": ("16385x4xH100", "the cluster has 65540 devices: at most 65536"),
    "no nodes": ("0x8xH100", "nodes of 0x8xH100 is 0"),
    "no workers": ("cpu:0", "'cpu:0' has 0 workers"),
    "unknown parameter": ("8xH100:nix=3", "'nix=3' in cluster .* did you mean nic"),
    "no value": ("8xH100:nics", "'nics' in cluster"),
    "wrong value": ("8xH100:nics=many", "'many' is not a value of nics"),
    "wrong truth": ("8xH100:rails=perhaps", "'perhaps' is not a value of rails"),
    "no nics": ("2x8xH100:nics=0", "nics of node 'H100' is 0"),
    "negative": ("2x8xH100:oversubscription=-1", "oversubscription of node 'H100' is -1.0"),
    "endless": ("2x8xH100:oversubscription=inf", "oversubscription of node 'H100' is inf"),
    "a comma": ("2x8xA100-40GB,nic=25GbE", "follow a colon; write it as 2x8xA100-40GB:nic=25GbE"),
    "unknown link": ("2x8xH100:nic=carrier-pigeon", "no link type 'carrier-pigeon'"),
    "unknown interconnect": ("8xH100:interconnect=rope", "interconnect of node 'H100' is 'rope': give one of nvswitch"),
    "no such link": ("8xL40S:interconnect=nvswitch", "device 'L40S' has no gpu_link"),
    "nothing": ("", "no cluster ''"),
    "half": ("4xH100+", "no cluster '4xH100\\+'"),
    "no file": ("nowhere/cluster.json", "cannot read 'nowhere/cluster.json'"),
}


@pytest.mark.parametrize(("name", "message"), BAD.values(), ids=BAD)
def test_a_wrong_name_is_refused_in_one_line(name, message):
    with pytest.raises(RequestError, match=message) as caught:
        find_cluster(name)
    assert "\n" not in str(caught.value)


def test_a_mesh_joins_any_two_devices_of_a_machine_directly():
    cluster = find_cluster("2x4xV100-32GB:nic=25GbE")
    pairs = {frozenset((link.a, link.b)) for link in cluster.links if "gpu" in link.a and "gpu" in link.b}
    assert len(pairs) == 2 * 6
    assert {link.bytes_per_s for link in cluster.links if {link.a, link.b} in pairs} == {20e9}
    assert 3e9 in {link.bytes_per_s for link in cluster.links}


def test_parts_of_a_node_keep_the_first_devices_and_their_share_of_the_nics():
    cluster = find_cluster("4xA100-40GB")
    assert [hub.name for hub in cluster.hubs] == ["nvswitch", "pcie0", "pcie1", "host0"]
    assert [hub.name for hub in find_cluster("2x4xA100-80GB").hubs if hub.kind == "nic"] == [
        "node0.nic0", "node0.nic1", "node1.nic0", "node1.nic1"]  # fmt: skip
    assert len(find_cluster("H100").devices) == 1
