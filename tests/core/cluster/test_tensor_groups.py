"""Groups of tensor ranks as devices: their paths, rings, and what is refused."""

import pytest
from panpipe.core.cluster.cluster import Cluster, Device, Hub, fully_connected
from panpipe.core.cluster.collectives import Algorithm, collective_s
from panpipe.core.cluster.mesh import Mesh
from panpipe.core.cluster.tensor_groups import NVLINK_HOP_S, RING_START_S, consecutive_groups
from panpipe.core.errors import RequestError


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
