"""Hosts' memory as links, by hand: where a path writes and reads, and rates that are refused."""

import pytest
from panpipe.core.cluster.host_memory import check_memory_rate, into_memory, memory_links, staged
from panpipe.core.cluster.routing import Link, ParallelPath
from panpipe.core.errors import RequestError

UP = [Link(f"gpu{i}", "host0", 10.0, 1.0) for i in range(2)]
ACROSS = Link("host0", "host1", 5.0, 1.0)
FAR = Link("host1", "gpu2", 10.0, 1.0)
MEMORIES = memory_links([("host0", 100.0), ("host1", 50.0), ("host2", None)])
FIRST, SECOND = MEMORIES["host0"], MEMORIES["host1"]


def test_memory_is_a_link_with_one_rate_for_both_directions():
    assert Link("host0", "memory of host0", 100.0, 0.0, both_bytes_per_s=100.0) == FIRST
    assert list(MEMORIES) == ["host0", "host1"]


def test_path_through_a_host_writes_its_memory_and_then_reads_it():
    path = ((UP[0], True), (UP[1], False))
    assert staged(path, MEMORIES) == ((UP[0], True), (FIRST, True), (FIRST, False), (UP[1], False))


def test_path_over_two_sockets_is_staged_in_the_first_alone():
    there = ((UP[0], True), (ACROSS, True), (FAR, True))
    assert staged(there, MEMORIES) == ((UP[0], True), (FIRST, True), (FIRST, False), (ACROSS, True), (FAR, True))
    back = ((FAR, False), (ACROSS, False), (UP[0], False))
    assert staged(back, MEMORIES)[:3] == ((FAR, False), (SECOND, True), (SECOND, False))


def test_path_that_crosses_no_memory_stays_as_it_is():
    direct = ((Link("gpu0", "gpu1", 1.0, 0.0), True),)
    assert staged(direct, MEMORIES) == direct
    path = ((UP[0], True), (UP[1], False))
    assert staged(path, {}) is path
    group = ParallelPath(path)
    assert staged(group, MEMORIES) is group


def test_copy_to_a_host_ends_in_its_memory():
    assert into_memory(((UP[0], True),), MEMORIES) == ((UP[0], True), (FIRST, True))
    assert into_memory(((UP[0], True), (ACROSS, True)), MEMORIES)[-1] == (SECOND, True)
    assert into_memory(((UP[0], True),), {}) == ((UP[0], True),)


@pytest.mark.parametrize("rate", [None, 1e-9, 1e15])
def test_rate_of_a_host_is_any_number_above_zero(rate):
    check_memory_rate("host0", "host", rate)
    check_memory_rate("nic0", "nic", None)


@pytest.mark.parametrize(
    ("kind", "rate", "rule"),
    [
        ("host", 0.0, "is 0.0: give a number above 0"),
        ("host", float("inf"), "is inf: give a number above 0"),
        ("host", float("nan"), "is nan: give a number above 0"),
        ("nic", 5.0, "is 5.0: only hubs of kind host have memory"),
    ],
)
def test_other_rates_are_refused(kind, rate, rule):
    with pytest.raises(RequestError, match=f"memory_bytes_per_s of 'h' {rule}"):
        check_memory_rate("h", kind, rate)
