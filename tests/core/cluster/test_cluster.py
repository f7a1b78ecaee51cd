"""Clusters: documents, paths, and everything that a file can have wrong."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from panpipe.core.cluster.catalog import find_device
from panpipe.core.cluster.cluster import HUB_KINDS, Cluster, Device, Hub, cluster_json, read_cluster
from panpipe.core.cluster.routing import Link
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
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def test_path_has_the_least_latency_then_the_fewest_links():
    links = (Link("a", "b", 1.0, 1.0), Link("a", "h", 9.0, 0.25), Link("h", "b", 9.0, 0.25))
    devices = (Device("a", 1), Device("b", 1))
    assert [link.bytes_per_s for link, _ in Cluster(devices, ("h",), links).path(0, 1)] == [9.0, 9.0]
    equal = (Link("a", "b", 1.0, 0.5), *links[1:])
    assert len(Cluster(devices, ("h",), equal).path(0, 1)) == 1


def test_devices_without_a_path_are_refused():
    cluster = Cluster((Device("a", 1), Device("b", 1)))
    with pytest.raises(RequestError, match=r"no link connects device 0 \('a'\) to 1 \('b'\): add one"):
        cluster.path(0, 1)


# Hubs and their kinds.


def places(cluster, path, start):
    """The places that a path leads through, from its start."""
    names = [start]
    for link, forward in path:
        assert names[-1] == (link.a if forward else link.b)
        names.append(link.b if forward else link.a)
    return names


def test_a_cluster_carries_types_of_its_own(tmp_path):
    own = find_device("H100")
    cluster = Cluster((Device("g", 5, own.name),), types=(own,))
    path = tmp_path / "cluster.json"
    path.write_text(cluster_json(cluster), encoding="utf-8")
    written = json.loads(path.read_text(encoding="utf-8"))["types"][0]
    assert written["peak_flops_per_s"]["bf16"] == {"value": 989.4e12, "source": own.sources["memory_bytes"].text}
    assert "assumed" in written["reserve_bytes"]
    assert read_cluster(path) == cluster
    assert cluster_json(read_cluster(path)) == path.read_text(encoding="utf-8")


def allowed(kinds, names, forwarding):
    """Whether a walk keeps the rule, read off it as the documentation puts it."""
    at = [number for number, name in enumerate(names) if kinds[name] is None]
    if any(kinds[name] is None and name not in forwarding for name in names[1:-1]):
        return False
    for first, last in pairwise(at):
        between = [kinds[name] for name in names[first + 1 : last]]
        cable = any(a == b == "nic" for a, b in pairwise(between))
        if between and not cable and "host" not in between and "switch" not in between:
            return False
    return True


def shortest(cluster, kinds, src, dst, most):
    """Latency and links of the best allowed walk, by trying all of at most this many links."""
    forwarding = {device.name for device in cluster.devices if device.forwards}
    best, walks = None, [((0.0, 0), [src])]
    while walks:
        (latency, count), names = walks.pop()
        if names[-1] == dst and allowed(kinds, names, forwarding):
            best = min(best or (latency, count), (latency, count))
        elif count < most and (best is None or (latency, count) < best):
            for link in cluster.links:
                for here, there in ((link.a, link.b), (link.b, link.a)):
                    if here == names[-1]:
                        walks.append(((latency + link.latency_s, count + 1), [*names, there]))
    return best


@st.composite
def clusters(draw):
    devices = [f"d{i}" for i in range(draw(st.integers(2, 3)))]
    hubs = [Hub(f"h{i}", draw(st.sampled_from(HUB_KINDS))) for i in range(draw(st.integers(1, 3)))]
    names = devices + [hub.name for hub in hubs]
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True, min_size=1, max_size=7))
    latency = st.sampled_from([0.25, 0.5, 1.0])
    links = tuple(Link(a, b, 1.0, draw(latency)) for a, b in chosen)
    return Cluster(tuple(Device(name, 1, None, draw(st.booleans())) for name in devices), tuple(hubs), links)


@given(clusters())
def test_paths_are_the_shortest_that_cross_pcie_only_through_a_host(cluster):
    kinds = {device.name: None for device in cluster.devices} | {hub.name: hub.kind for hub in cluster.hubs}
    best = shortest(cluster, kinds, "d0", "d1", most=6)
    try:
        path = cluster.path(0, 1)
    except RequestError:
        assert best is None
        return
    names = places(cluster, path, "d0")
    assert names[-1] == "d1"
    assert allowed(kinds, names, {device.name for device in cluster.devices if device.forwards})
    assert (sum(link.latency_s for link, _ in path), len(path)) == best


@given(clusters(), st.randoms(use_true_random=False))
def test_paths_do_not_depend_on_names(cluster, random):
    names = [device.name for device in cluster.devices] + [hub.name for hub in cluster.hubs]
    other = dict(zip(names, random.sample([f"x{i}" for i in range(len(names))], len(names)), strict=True))
    renamed = Cluster(
        tuple(Device(other[device.name], 1, None, device.forwards) for device in cluster.devices),
        tuple(Hub(other[hub.name], hub.kind) for hub in cluster.hubs),
        tuple(Link(other[link.a], other[link.b], 1.0, link.latency_s) for link in cluster.links),
    )
    try:
        path = cluster.path(0, 1)
    except RequestError:
        with pytest.raises(RequestError):
            renamed.path(0, 1)
        return
    assert [other[name] for name in places(cluster, path, "d0")] == places(renamed, renamed.path(0, 1), other["d0"])


def test_equal_paths_are_distributed_by_destination():
    devices = (Device("a", 1), Device("b", 1), Device("c", 1))
    links = tuple(Link(device.name, hub, 1.0, 0.5) for device in devices for hub in ("left", "right"))
    cluster = Cluster(devices, ("left", "right"), links)
    assert [places(cluster, cluster.path(0, dst), "a")[1] for dst in (1, 2)] == ["right", "left"]


def add_type(data, **changes):
    """Describe the first device's type in the file, with something wrong."""
    own = json.loads(cluster_json(Cluster((Device("g", 5),), types=(find_device("H100"),))))["types"][0]
    data["types"] = [own | changes]


BAD = {
    "newer": (lambda d: d.update(format="panpipe.cluster/9"), "version 1"),
    "unknown field": (lambda d: d["devices"][0].update(colour=1), "colour"),
    "no devices": (lambda d: d.update(devices=[], links=[]), "no devices"),
    "twice": (lambda d: d.update(hubs=["g0"]), "'g0' appears twice"),
    "no memory": (lambda d: d["devices"][1].update(memory_bytes=0), "memory_bytes of 'g1' is 0"),
    "unknown end": (lambda d: d["links"][0].update(b="x"), "names 'x'"),
    "no rate": (lambda d: d["links"][0].update(bytes_per_s=0), "rate must be above 0"),
    "negative latency": (lambda d: d["links"][0].update(latency_s=-1), "latency at least 0"),
    "latency of years": (lambda d: d["links"][0].update(latency_s=4e7), "latency_s of link .* more than a year"),
    "unknown kind": (lambda d: d.update(hubs=[{"name": "switch", "kind": "toaster"}]), "'switch' has kind 'toaster'"),
    "hub without a name": (lambda d: d.update(hubs=[{"kind": "nic"}]), "name"),
    "hub with more": (lambda d: d.update(hubs=[{"name": "switch", "speed": 1}]), "speed"),
    "hub twice": (lambda d: d["hubs"].append({"name": "switch", "kind": "nic"}), "'switch' appears twice"),
    "link twice": (lambda d: d["links"].append(dict(d["links"][0], a="switch", b="g0")), "switch – g0 appears twice"),
    "link to itself": (lambda d: d["links"][0].update(b="g0"), "g0 – g0 joins a place to itself"),
    "negative rate": (lambda d: d["links"][0].update(bytes_per_s=-5.0), "rate must be above 0"),
    "endless rate": (lambda d: d["links"][0].update(bytes_per_s=float("inf")), "inf is not a finite number"),
    "rate of nothing": (lambda d: d["links"][0].update(bytes_per_s=float("nan")), "nan is not a finite number"),
    "endless latency": (lambda d: d["links"][0].update(latency_s=float("inf")), "inf is not a finite number"),
    "latency of nothing": (lambda d: d["links"][0].update(latency_s=float("nan")), "nan is not a finite number"),
    "type without a source": (lambda d: add_type(d, memory_bytes=5), "memory_bytes of device type 'H100' is a bare 5"),
    "type too fast": (
        lambda d: add_type(d, effective_memory_bytes_per_s={"value": 1e15, "source": "a dream"}),
        "is 1e[+]15, above its peak",
    ),
    "type is no object": (lambda d: d.update(types=["H100"]), "not the object of a device type"),
    "missing": (lambda d: d["links"][0].pop("latency_s"), "latency_s"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_a_wrong_file_is_refused_in_one_line(tmp_path, change, message):
    with pytest.raises(RequestError, match=message) as caught:
        read_cluster(changed(tmp_path, change))
    assert "\n" not in str(caught.value)


def test_devices_in_another_order_keep_their_paths():
    # Two NICs behind each device's switch, and both ways equally long: the device's number chooses one.
    names = [f"{kind}{i}" for i in range(4) for kind in ("pcie", "x", "y")]
    hubs = [*(Hub(name, "pcie" if name.startswith("pcie") else "nic") for name in names), Hub("net")]
    links = [
        link
        for i in range(4)
        for link in (
            Link(f"d{i}", f"pcie{i}", 10.0, 0.0),
            *(Link(f"pcie{i}", f"{nic}{i}", 10.0, 0.0) for nic in "xy"),
            *(Link(f"{nic}{i}", "net", 10.0, 0.0) for nic in "xy"),
        )
    ]
    cluster = Cluster(tuple(Device(f"d{i}", 1) for i in range(4)), tuple(hubs), tuple(links))
    arranged = cluster.arranged((2, 3, 1, 0))
    assert [device.name for device in arranged.devices] == ["d2", "d3", "d1", "d0"]
    assert arranged.path(0, 1) == cluster.path(2, 3)
    assert arranged.path(0, 3) == cluster.path(2, 0) != cluster.path(2, 1)
