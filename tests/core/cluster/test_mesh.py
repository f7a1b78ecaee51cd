"""Meshes as people write them, and groups of tensor ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from panpipe.core.cluster.cluster import Cluster, Device, Hub, fully_connected
from panpipe.core.cluster.collectives import Algorithm, collective_s
from panpipe.core.cluster.mesh import Mesh, parse_mesh
from panpipe.core.cluster.tensor_groups import NVLINK_HOP_S, RING_START_S, consecutive_groups
from panpipe.core.errors import RequestError

# Meshes as people write them.


@pytest.mark.parametrize(
    ("text", "devices", "mesh"),
    [
        ("pp=4", 4, Mesh(4)),
        ("pp=4", None, Mesh(4)),
        ("dp=1", None, Mesh(2)),
        ("pp=2,dp=2", 4, Mesh(2, 2, ((0, 2), (1, 3)))),
        ("dp=2,pp=2", 4, Mesh(2, 2)),
        ("dp=2, pp=4", 8, Mesh(4, 2)),
        ("pp=4,dp=2", 8, Mesh(4, 2, ((0, 2, 4, 6), (1, 3, 5, 7)))),
        ("dp=3", 6, Mesh(2, 3, ((0, 3), (1, 4), (2, 5)))),
        ("pp=1,dp=3", 3, Mesh(1, 3)),
    ],
)
def test_the_last_dimension_has_neighbouring_devices(text, devices, mesh):
    assert parse_mesh(text).over(devices) == mesh


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("four", "'four' is not a mesh: write"),
        ("pp=", "'pp=' is not a mesh"),
        ("pp=-1", "'pp=-1' is not a mesh"),
        (f"pp={'9' * 5000}", "is not a mesh: write its dimensions"),
        ("pp=2,dp=0", "has dp=0: give every dimension once, at least 1"),
        ("pp=2,pp=2", "has pp twice"),
        ("pp=2,tp=2", "a dimension 'tp': the dimensions are pp .the pipeline. and dp"),
    ],
)
def test_invalid_mesh_is_refused_in_one_line(text, said):
    with pytest.raises(RequestError, match=said) as refusal:
        parse_mesh(text)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pp=2,dp=2", "is for 4 devices and there are 6 ranks: .* such as pp=3,dp=2, or 4 ranks"),
        ("pp=4", "is for 4 devices and there are 6 ranks: .* such as pp=6, or 4 ranks"),
        ("dp=4", "is for 4 devices and there are 6 ranks: .* such as pp=6"),
        ("dp=7", "is for 7 devices and there are 6 ranks"),
    ],
)
def test_mesh_for_another_number_of_devices_is_refused_with_both_numbers(text, said):
    with pytest.raises(RequestError, match=said):
        parse_mesh(text).over(6, "ranks")


@given(st.integers(1, 5), st.integers(1, 5), st.booleans())
def test_every_device_has_one_place(pipeline, data, pipeline_last):
    text = f"dp={data},pp={pipeline}" if pipeline_last else f"pp={pipeline},dp={data}"
    mesh = parse_mesh(text).over(pipeline * data)
    mesh.check()
    places = [mesh.place(device) for device in range(mesh.ranks)]
    assert sorted(places) == [(r, p) for r in range(data) for p in range(pipeline)]
    for device, (replica, position) in enumerate(places):
        assert device == (replica * pipeline + position if pipeline_last else position * data + replica)


# Groups of tensor ranks as devices: their paths, rings, and what is refused.


def test_ring_of_a_group_takes_the_time_of_the_collective():
    cluster = fully_connected(8, 1000, 10.0, 0.5)
    pcie = Cluster(cluster.devices, (Hub("x", "pcie"),), cluster.links)
    ring = consecutive_groups(pcie, 4).ring(1)
    size = 4000.0
    # Latencies are not those of a link of the catalogue here: half a second is more than NCCL's hop.
    assert ring.latency_s == RING_START_S + 6 * NVLINK_HOP_S
    alone_s = collective_s(cluster, range(4, 8), size, algorithm=Algorithm.RING)
    assert ring.bytes * size / ring.bytes_per_s == pytest.approx(alone_s - 6 * 0.5)
    assert ring.bytes == 2 * 3 / 4


def test_unequal_devices_of_a_group_are_refused():
    cluster = fully_connected(2, 1000, 10.0, 0.5)
    other = Cluster((cluster.devices[0], Device("device1", 900)), (), cluster.links)
    with pytest.raises(RequestError, match="'device0' and 'device1' are ranks of one stage and differ"):
        consecutive_groups(other, 2)


@pytest.mark.parametrize("tensor", [0, 3, 8])
def test_number_of_tensor_ranks_that_does_not_divide_the_devices_is_refused(tensor):
    with pytest.raises(RequestError, match=f"{tensor} tensor ranks do not divide the 4 devices"):
        consecutive_groups(fully_connected(4, 1000, 10.0, 0.5), tensor)


def test_mesh_arranges_the_groups_of_its_ranks():
    cluster = fully_connected(8, 1000, 10.0, 0.5)
    mesh = Mesh(2, 2, ((4, 5, 0, 1), (6, 7, 2, 3)), tensor=2)
    arranged = mesh.arrange(cluster)
    assert arranged.groups == ((4, 5), (0, 1), (6, 7), (2, 3))
    assert mesh.cluster_devices == (4, 0, 6, 2)
    assert mesh.replicas == ((4, 0), (6, 2))
    assert (mesh.ranks, mesh.size) == (4, 8)
    assert Mesh(2, 2, tensor=2).arrange(cluster).groups == ((0, 1), (2, 3), (4, 5), (6, 7))


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        (Mesh(2, 1, tensor=0), "mesh is 2 × 1 × 0 tensor ranks: all must be at least 1"),
        (Mesh(2, 1, ((0, 1),), tensor=2), r"mesh.devices has replicas of \[2\] devices: give 1 replicas of 4 each"),
        (Mesh(2, 1, ((0, 1, 2, 2),), tensor=2), "names device 2 twice"),
        (Mesh(3, 1, tensor=2), "needs 6 devices and the cluster has 4"),
        (Mesh(1, 1, ((0, 7),), tensor=2), "uses device 7, counted from 0, and the cluster has 4"),
    ],
)
def test_wrong_mesh_is_refused(mesh, said):
    with pytest.raises(RequestError, match=said):
        mesh.check(fully_connected(4, 1000, 10.0, 0.5))
