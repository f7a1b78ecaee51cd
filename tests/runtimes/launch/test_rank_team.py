"""A team of four real ranks, two replicas of two devices: what each call returns, and failures that reach all."""

import pytest

from ...support.launch import alone, results

ORDER = [[0, 0], [0, 1], [1, 0], [1, 1]]
"""Replica and device of every rank in the order of the mesh: 0 and 2 are a pipeline, and so are 1 and 3."""


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return results("calls_of_a_team", tmp_path_factory.mktemp("team"), 4, MESH="pp=2,dp=2")


def each(four, call):
    return [rank[call] for rank in four]


def test_each_rank_is_one_device_of_one_replica(four):
    assert each(four, "place") == [[0, 0, 0, True], [1, 1, 0, False], [2, 0, 1, False], [3, 1, 1, False]]
    assert each(four, "local") == [0, 0, 10, 10]


def test_results_are_in_the_order_of_the_mesh_on_every_rank(four):
    assert each(four, "everywhere") == [ORDER] * 4
    assert each(four, "in replica") == [ORDER[:2], ORDER[2:], ORDER[:2], ORDER[2:]]


def test_first_rank_decides_for_all(four):
    assert each(four, "decided") == ["by rank 0"] * 4
    assert each(four, "collectively") == [4] * 4


def test_failure_to_decide_or_of_some_ranks_is_raised_on_all(four):
    for rank, (decided, agreed) in enumerate(each(four, "refused")):
        assert decided == "the first device cannot decide"
        # A rank raises its own; the others the first one in the order of the mesh: rank 2 is before rank 1.
        assert agreed == ("rank 1 has no memory" if rank == 1 else "rank 2 has no memory")


def test_numbers_are_summed_over_the_ranks_that_share_a_batch(four):
    assert each(four, "sum") == [[2, 0 + 2], [2, 1 + 3], [2, 0 + 2], [2, 1 + 3]]


def test_exchanges_are_in_the_order_of_the_mesh_also_in_the_background(four):
    assert each(four, "numbers") == [[0, 0], [2, 2], [1, 1], [3, 3]]
    assert each(four, "gathered") == [[[0, 2, 1, 3]] * 2] * 4
    assert all(each(four, "same exchange"))


def test_transports_connect_a_pipeline_and_its_replicas(four):
    assert each(four, "message") == [2.0, 3.0, 0.0, 1.0]
    assert each(four, "replicas") == [[2, None]] * 4  # no tensor ranks
    assert all(each(four, "clock"))


def test_pipeline_goes_on_after_the_one_that_created_the_process_group_is_closed(tmp_path):
    """The group, and what the second one's watch reads in the job's store, were removed with the first one."""
    first, second = results("outlives_the_first", tmp_path, 2)
    assert first["losses"] == second["losses"] == sorted(first["losses"], reverse=True)
    assert max(first["seconds"], second["seconds"]) < 2.5
    assert (first["remains"], first["group"]) == (True, False)


def test_failure_of_one_rank_is_its_own_there_and_names_it_elsewhere(tmp_path):
    other, own = alone("failing_rank_of_a_team", tmp_path, 2)
    assert own.returncode != 0
    assert "ValueError: the data is missing" in own.stderr
    assert "WorkerError" not in own.stderr
    assert other.returncode != 0
    assert "rank 1 stopped: ValueError: the data is missing" in other.stderr
