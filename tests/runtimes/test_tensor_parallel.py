"""Models after ``parallelize_module`` over four real processes, two stages of two tensor ranks, equal one process."""

import pytest

from ..support.launch import results


def check(found, case):
    for rank in found:
        distances = rank[case]
        for name in ("loss", "gradient", "parameter", "norm"):
            assert distances[name] < 1e-9, (case, name, distances)
        assert distances["here"]


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return results("tensor_ranks", tmp_path_factory.mktemp("tensor"), 4)


def test_tensor_ranks_train_as_one_process_does(four):
    check(four, "trained")
    held = [set(rank["trained"]["here"]) for rank in four]
    assert held[0] == held[1]
    assert held[2] == held[3]
    assert not held[0] & held[2]
    assert len(held[0] | held[2]) == 10


@pytest.mark.slow
def test_transformer_over_tensor_ranks_trains_by_automatic_plans(tmp_path):
    found = results("more_tensor_ranks", tmp_path, 4)
    check(found, "neighbours")
    check(found, "apart")
