"""Replicas that share optimizers, gradients or parameters, over gloo: four processes equal one on all their batches."""

import pytest

from ..support.launch import results, results_of
from .test_replicas import SKIPPED, check, check_updates

pytestmark = pytest.mark.slow  # some checkpoints and schedules, and one case, are in `test_replicas`
PLACES = [[0, 0], [1, 0], [0, 1], [1, 1]]
JOBS = ["sharded", "scattered", "parted"]
"""Of the levels ``optimizer``, ``gradients`` and ``parameters``."""


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Two replicas of a pipeline of two: what several jobs find in one start."""
    jobs = [*JOBS, *(f"{job}_scaling" for job in JOBS), "replanned_sharing", "unfrozen_sharing"]
    return results_of(jobs, tmp_path_factory.mktemp("four"), 4, MESH="pp=2,dp=2")


@pytest.mark.parametrize("job", JOBS)
def test_replicas_that_share_train_like_one_process(four, job):
    check(four[job], PLACES)


@pytest.mark.parametrize("job", JOBS)
def test_elementwise_optimizers_with_clipping_and_accumulation(four, job):
    for one in four[job]:
        assert set(one["optimizers"]) == {"sgd", "adagrad", "groups"}
        assert max(one["optimizers"].values()) < 1e-9, one["optimizers"]


@pytest.mark.parametrize("job", JOBS)
def test_scaled_losses_of_replicas_that_share(four, job):
    found = four[f"{job}_scaling"]
    check_updates(found)
    for one in found:
        assert [mine for mine, _ in one["cases"]["float16"]["skipped"]] == SKIPPED


def test_stages_move_while_replicas_share_optimizers_or_gradients(four):
    for one in four["replanned_sharing"]:
        for level, distances in one.items():
            assert max(distances.values()) < 1e-9, (level, distances)


def test_parameters_are_unfrozen_while_replicas_share_optimizers_or_gradients(four):
    for one in four["unfrozen_sharing"]:
        assert set(one) == {"optimizer", "gradients"}
        assert max(one.values()) < 1e-9, one


@pytest.mark.parametrize(("mesh", "ranks"), [("dp=2,pp=2", 4), ("pp=1,dp=2", 2), ("dp=3,pp=1", 3)])
def test_stages_move_while_replicas_share_parameters_over_other_meshes(tmp_path, mesh, ranks):
    for one in results("replanned_parted", tmp_path, ranks, MESH=mesh):
        assert max(one.values()) < 1e-9, one


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize(("mesh", "places"), [("pp=1,dp=2", [[0, 0], [1, 0]]), ("dp=3,pp=1", [[0, 0], [1, 0], [2, 0]])])
def test_sharding_over_other_meshes(tmp_path, mesh, places, job):
    check(results(job, tmp_path, len(places), MESH=mesh), places)
