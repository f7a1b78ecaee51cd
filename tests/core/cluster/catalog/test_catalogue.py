"""Catalogue and cluster files of users: their own devices, links, nodes and clusters, and all that can be wrong."""

import json

import pytest
from panpipe.core.cluster.catalog import catalogue, device_type, find_cluster
from panpipe.core.cluster.cluster import cluster_json
from panpipe.core.errors import RequestError

LAB = """
format = "panpipe.catalog/1"

[sources]
bench = "measured in our lab"

[devices.H20X]
like = "H100"
title = "An accelerator of our own"
memory_bytes = { value = 96_000_000_000, source = "bench" }
gpu_link = "ring"

[devices.H20X.peak_flops_per_s]
bf16 = { value = 1200e12, assumed = "as announced" }

[links.ring]
title = "Our own cable"
peak_bytes_per_s = { value = 200e9, source = "bench" }
effective_bytes_per_s = { value = 150e9, source = "bench" }
latency_s = { value = 2e-6, assumed = "short" }

[nodes.H20X]
like = "RTX3090"
device = "H20X"
gpus = { value = 4, source = "bench" }

[clusters.lab]
title = "The cluster in the basement"
groups = [{ nodes = 2, node = "H20X", gpus = 4, parameters = { nics = 2 } }]
"""


@pytest.fixture
def lab(tmp_path):
    path = tmp_path / "lab.toml"
    path.write_text(LAB, encoding="utf-8")
    return path


def test_file_adds_devices_links_nodes_and_a_cluster(lab):
    cluster = find_cluster(str(lab))
    assert cluster == find_cluster(lab)
    assert len(cluster.devices) == 8
    assert cluster.devices[0].memory_bytes == 95_000_000_000
    (bridge, _), *rest = cluster.path(0, 1)
    assert (bridge.bytes_per_s, bridge.latency_s, rest) == (150e9, 2e-6, [])
    assert sum(hub.kind == "nic" for hub in cluster.hubs) == 4


def test_cluster_is_selected_by_its_name_after_the_path(lab):
    assert len(find_cluster(f"{lab}#lab").devices) == 8
    assert len(find_cluster(f"{lab}#4xH20X").devices) == 4
    assert len(find_cluster(f"{lab}#2xH20X+2xH100").devices) == 4
    lab.write_text(LAB + '[clusters.more]\ntitle = "More"\ngroups = [{ node = "H20X", gpus = 1 }]\n', encoding="utf-8")
    with pytest.raises(RequestError, match=r"has 2 clusters: name one as in .*lab.toml#lab"):
        find_cluster(lab)
    assert len(find_cluster(f"{lab}#more").devices) == 1


def test_file_without_clusters_is_refused_with_the_fix(lab):
    lab.write_text(LAB[: LAB.index("[clusters")], encoding="utf-8")
    with pytest.raises(RequestError, match=r"has no clusters: name one as in .*lab.toml#2xH20X$"):
        find_cluster(lab)


def test_a_cluster_file_names_devices_of_the_catalogue(tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text(cluster_json(find_cluster("2xH100")), encoding="utf-8")
    assert device_type(find_cluster(path), 1).name == "H100"
    data = json.loads(path.read_text(encoding="utf-8"))
    data["devices"][1]["type"] = "H100X"
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(RequestError, match=r"no device type 'H100X': did you mean H100.*or describe it under types"):
        find_cluster(path)
    data["devices"][1]["type"] = None
    path.write_text(json.dumps(data), encoding="utf-8")
    assert device_type(find_cluster(path), 1) is None


def test_broken_cluster_file_is_refused(tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text(cluster_json(find_cluster("2xH100"))[:-20], encoding="utf-8")
    with pytest.raises(RequestError, match="not a whole JSON file"):
        find_cluster(str(path))


def replaced(old, new):
    assert old in LAB
    return LAB.replace(old, new)


RING = "[links.ring]"
BAD = {
    "not TOML": (LAB[:-10], "is not a TOML file"),
    "another format": (replaced("panpipe.catalog/1", "panpipe.catalog/9"), "reads version 1"),
    "no format": (replaced('format = "panpipe.catalog/1"', ""), "it must state"),
    "unknown section": (LAB + "[gadgets.a]\n", "has 'gadgets': known are devices, links, nodes, clusters"),
    "name twice": (LAB + RING, "is not a TOML file"),
    "name taken": (replaced("[links.ring]", "[links.nvlink3-port]"), "link 'nvlink3-port' is in the catalogue already"),
    "unknown field": (replaced('title = "Our own cable"', 'titel = "Our own cable"'), "titel"),
    "missing field": (replaced('title = "Our own cable"', ""), "title"),
    "bare number": (replaced('{ value = 200e9, source = "bench" }', "200e9"), "is a bare 200000000000.0: write"),
    "no source": (replaced('{ value = 200e9, source = "bench" }', "{ value = 200e9 }"), "has no source"),
    "both": (
        replaced('{ value = 200e9, source = "bench" }', '{ value = 200e9, source = "a", assumed = "b" }'),
        "has assumed and source: give one",
    ),
    "empty source": (replaced('assumed = "short"', 'assumed = " "'), "describe in words"),
    "negative rate": (replaced("value = 150e9", "value = -150e9"), "effective_bytes_per_s of link 'ring' is -15"),
    "endless rate": (replaced("value = 150e9", "value = inf"), "inf is not a finite number @ ring.eff"),
    "rate of nothing": (replaced("value = 150e9", "value = nan"), "nan is not a finite number @ ring.eff"),
    "negative latency": (replaced("value = 2e-6", "value = -2e-6"), "latency_s of link 'ring' is -2e-06"),
    "above the peak": (replaced("value = 150e9", "value = 250e9"), "above its peak of 2e[+]11"),
    "a word": (replaced("value = 150e9", 'value = "fast"'), "'fast' is not a number"),
    "half a byte": (replaced("96_000_000_000", "0.5"), "0.5 is not a whole number"),
    "unknown link": (replaced('gpu_link = "ring"', 'gpu_link = "rope"'), "no link type 'rope'"),
    "unknown device": (replaced('device = "H20X"', 'device = "H20Y"'), "no device type 'H20Y'"),
    "unknown node": (replaced('node = "H20X"', 'node = "H20Y"'), "no device type 'H20Y'"),
    "like nothing": (
        replaced('like = "H100"', 'like = "H101"'),
        "like 'H101', which does not exist: did you mean H100",
    ),
    "like itself": (replaced('like = "H100"', 'like = "H20X"'), "is like itself"),
    "unknown number type": (replaced("bf16 =", "fp13 ="), "peak_flops_per_s of device 'H20X' is for fp13"),
    "all is reserved": (replaced("96_000_000_000", "1_000_000_000"), "reserves 1000000000 of its 1000000000 bytes"),
    "no groups": (replaced("groups = [{", "groups_ = [{"), "groups"),
    "no NICs": (replaced("nics = 2", "nics = 0"), "nics of node 'H20X' is 0"),
    "no nodes": (replaced("nodes = 2", "nodes = 0"), "nodes of 0x4xH20X is 0"),
    "alias taken": (
        replaced('gpu_link = "ring"', 'gpu_link = "ring"\naliases = ["a100 sxm 40gb"]'),
        "alias 'a100 sxm 40gb' of device 'H20X' is device 'A100-40GB': leave it out",
    ),
    "sources not a table": (
        replaced('[sources]\nbench = "measured in our lab"', "sources = 3"),
        "sources is not a table",
    ),
    "not a table": (LAB + "[links]\nrope = 5\n", "TOML|not a table of tables"),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD)
def test_a_wrong_catalogue_file_is_refused_in_one_line(lab, text, message):
    lab.write_text(text, encoding="utf-8")
    with pytest.raises(RequestError, match=message) as caught:
        find_cluster(lab)
    assert str(lab) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "unknown error" not in str(caught.value)


def test_aliases_are_not_inherited(lab):
    own = '[devices.H20Z]\nlike = "H20X"\ntitle = "Another"\n'
    lab.write_text(
        LAB.replace('title = "An accelerator of our own"', 'title = "An"\naliases = ["twenty"]') + own, encoding="utf-8"
    )
    extended = catalogue().with_file(lab.read_text(encoding="utf-8"), "lab")
    assert extended.device("twenty").name == "H20X"
    assert extended.device("H20Z").aliases == ()
