"""Devices of a cluster at the positions of pipelines: blocks, strides, near neighbours, and the most memory first."""

import itertools

import numpy as np
import pytest
from panpipe.core.cluster.cluster import Cluster, Device, fully_connected
from panpipe.core.cluster.collectives import collective_s
from panpipe.core.cluster.routing import Link
from panpipe.core.search.problem.arrangements import GRADIENT_BYTES, arrangements, nearest_order, reduction_rates


def cluster_of(fast, memory=(100,) * 4):
    """Four devices; pairs in ``fast`` have a link 10⁶ times as fast as the others."""
    links = (
        Link(f"d{a}", f"d{b}", 1e9 if (a, b) in fast else 1e3, 0.0) for a, b in itertools.combinations(range(4), 2)
    )
    return Cluster(tuple(Device(f"d{i}", size) for i, size in enumerate(memory)), (), tuple(links))


def test_equal_devices_are_arranged_in_blocks_and_in_strides_alone():
    cluster = fully_connected(4, 100, 10.0, 1.0)
    assert arrangements(cluster, 2, 2) == [((0, 1), (2, 3)), ((0, 2), (1, 3))]
    assert arrangements(cluster, 4, 1) == [((0, 1, 2, 3),)]  # both are the same
    assert arrangements(cluster, 3, 1) == [((0, 1, 2),)]  # of the first devices
    assert arrangements(cluster, 1, 1) == [((0,),)]


def test_unequal_links_add_an_arrangement_with_near_neighbours():
    fast = {(0, 2), (1, 2), (1, 3)}
    plain, ((*near,),) = arrangements(cluster_of(fast), 4, 1)
    assert plain == ((0, 1, 2, 3),)
    assert {tuple(sorted(pair)) for pair in zip(near, (*near[1:], near[0]), strict=True)} == {*fast, (0, 3)}


def test_unequal_memory_adds_arrangements_with_the_most_memory_first():
    cluster = cluster_of((), memory=(1, 4, 2, 3))
    assert arrangements(cluster, 2, 2)[2:] == [((1, 0), (3, 2)), ((2, 0), (1, 3))]


def matrix(near, far=10.0):
    """Distances of four devices: 1 for the given pairs."""
    found = np.full((4, 4), far)
    np.fill_diagonal(found, 0.0)
    for a, b in near:
        found[a, b] = found[b, a] = 1.0
    return found


def test_nearest_order_is_the_shortest_tour():
    distances = matrix({(0, 2), (1, 2), (1, 3)})
    assert nearest_order(distances, range(4)) == (0, 2, 1, 3)
    assert nearest_order(distances, (3, 1, 2, 0)) == (3, 1, 2, 0)  # it is the same tour


def test_nearest_order_that_gains_little_keeps_the_given_one():
    distances = matrix(())
    distances[0, 2] = distances[2, 0] = 9.9  # a tour of 39.9 in place of 40
    assert nearest_order(distances, range(4)) == (0, 1, 2, 3)


def test_reduction_rates_are_a_line_through_the_times_of_the_collective():
    cluster = cluster_of({(0, 2)})
    rates = reduction_rates(cluster, ((0, 1), (2, 3)))
    for position, members in enumerate([(0, 2), (1, 3)]):
        for size in (1.0, GRADIENT_BYTES):
            assert rates[0, position] + size * rates[1, position] == pytest.approx(collective_s(cluster, members, size))
    assert rates[1, 1] > 1000 * rates[1, 0]
    assert not reduction_rates(cluster, ((0, 1, 2, 3),)).any()
