"""Replicas that share optimizers over gloo: four real processes equal one on all their batches."""

import pytest

from ..support.launch import results, results_of
from .test_replicas import SKIPPED, check, check_updates

pytestmark = pytest.mark.slow  # checkpoints, state and one case are in `test_replicas`
PLACES = [[0, 0], [1, 0], [0, 1], [1, 1]]


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Two replicas of a pipeline of two: what several jobs find in one start."""
    return results_of(["sharded", "sharded_scaling"], tmp_path_factory.mktemp("four"), 4, MESH="pp=2,dp=2")


def test_replicas_that_share_optimizers_train_like_one_process(four):
    check(four["sharded"], PLACES)


def test_elementwise_optimizers_with_clipping_and_accumulation(four):
    for one in four["sharded"]:
        assert set(one["optimizers"]) == {"sgd", "adagrad", "groups"}
        assert max(one["optimizers"].values()) < 1e-9, one["optimizers"]


def test_scaled_losses_of_replicas_that_share_optimizers(four):
    check_updates(four["sharded_scaling"])
    for one in four["sharded_scaling"]:
        assert [mine for mine, _ in one["cases"]["float16"]["skipped"]] == SKIPPED


@pytest.mark.parametrize(("mesh", "places"), [("pp=1,dp=2", [[0, 0], [1, 0]]), ("dp=3,pp=1", [[0, 0], [1, 0], [2, 0]])])
def test_sharding_over_other_meshes(tmp_path, mesh, places):
    check(results("sharded", tmp_path, len(places), MESH=mesh), places)
