"""Clusters by name or file, and the types of their devices."""

import pytest
from attrs import evolve
from panpipe.core.cluster.catalog.find import device_type, find_cluster, host_memory_bytes, required_type
from panpipe.core.cluster.cluster import cluster_json, fully_connected
from panpipe.core.errors import RequestError


def test_workers_of_this_host_have_equal_shares_of_its_memory():
    cluster = find_cluster("cpu:4")
    assert [device.memory_bytes for device in cluster.devices] == [host_memory_bytes() // 4] * 4
    assert {device.type for device in cluster.devices} == {"cpu-core"}
    assert find_cluster("local:4") == cluster
    with pytest.raises(RequestError, match="'cpu:0' has 0 workers"):
        find_cluster("cpu:0")


def test_type_of_a_device_is_the_clusters_own_or_the_catalogues():
    cluster = find_cluster("2xA100-40GB")
    assert device_type(cluster, 1).name == required_type(cluster, 0).name == "A100-40GB"
    own = evolve(required_type(cluster, 0), name="mine")
    named = evolve(cluster, devices=tuple(evolve(device, type="mine") for device in cluster.devices), types=(own,))
    assert device_type(named, 0) is own


def test_device_without_a_type_is_refused_where_costs_need_one():
    cluster = fully_connected(2, 1000, 1e9, 0.0)
    assert device_type(cluster, 0) is None
    with pytest.raises(RequestError, match="of the cluster has no type, so a model's costs are unknown"):
        required_type(cluster, 0)


def test_file_with_an_unknown_type_is_refused_by_its_path(tmp_path):
    file = tmp_path / "cluster.json"
    cluster = fully_connected(2, 1000, 1e9, 0.0)
    file.write_text(cluster_json(cluster))
    assert find_cluster(str(file)) == find_cluster(file) == cluster
    file.write_text(cluster_json(evolve(cluster, devices=tuple(evolve(d, type="A1000") for d in cluster.devices))))
    with pytest.raises(RequestError, match=r"cluster.json: .*; or describe it under types"):
        find_cluster(file)


def test_missing_file_and_unknown_name_are_refused(tmp_path):
    for name in ("missing.json", str(tmp_path / "none"), "missing.toml#x"):
        with pytest.raises(RequestError, match="cannot read"):
            find_cluster(name)
    with pytest.raises(RequestError):
        find_cluster("8xA1000")
