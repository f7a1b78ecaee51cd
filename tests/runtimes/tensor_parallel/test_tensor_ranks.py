"""The ranks that share each stage: their mesh and plans, and results that differ; without processes."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from attrs import evolve
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.cluster.mesh import Mesh, MeshShape
from panpipe.core.costs.reductions import TensorReductions
from panpipe.core.errors import RequestError
from panpipe.runtimes.launch.rank_tensors import Split
from panpipe.runtimes.tensor_parallel.tensor_ranks import TensorRanks
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from ...support.plans import orders, plan_of, predicted

PLAN = plan_of(orders("0F0 0B0", "1F0 1B0"), (0, 1))


def ranks(data=1, pipeline_last=True, size=2, dims=None):
    step = SimpleNamespace(of=lambda function: SimpleNamespace(function=function))
    return TensorRanks(
        nn.Linear(1, 1), nn.Linear(1, 1), step, None, dims or {}, tuple(range(size)), None, data, pipeline_last
    )


def groups(*rows):
    """For each rank of the job its tensor ranks."""
    return [next(row for row in rows if rank in row) for rank in range(sum(map(len, rows)))]


def test_each_tensor_rank_of_a_stage_has_a_replica_in_the_mesh():
    assert ranks().mesh_of(groups((0, 1), (2, 3))) == Mesh(2, 2, ((0, 2), (1, 3)))
    assert ranks().mesh_of(groups((0, 2), (1, 3))) == Mesh(2, 2, ((0, 1), (2, 3)))


def test_batches_are_the_first_or_the_last_dimension():
    found = groups((0, 1), (2, 3), (4, 5), (6, 7))
    assert ranks(2).mesh_of(found) == Mesh(2, 4, ((0, 2), (1, 3), (4, 6), (5, 7)))
    assert ranks(2, pipeline_last=False).mesh_of(found) == Mesh(2, 4, ((0, 4), (1, 5), (2, 6), (3, 7)))


@pytest.mark.parametrize("rows", [[(0, 1), (2,)], [(0, 1), (1, 2)]])
def test_groups_that_are_no_mesh_are_refused(rows):
    given = groups(*rows) if len({r for row in rows for r in row}) == sum(map(len, rows)) else [rows[0], *rows]
    with pytest.raises(RequestError, match=r"the models' tensor ranks are .*each rank of the job must be in one group"):
        ranks().mesh_of(given)


def test_number_of_replicas_that_does_not_divide_the_groups_is_refused():
    with pytest.raises(RequestError, match=r"mesh has 2 replicas \(dp\) and the job has 3 groups of 2 tensor ranks"):
        ranks(2).mesh_of(groups((0, 1), (2, 3), (4, 5)))


MESH = Mesh(2, 2, ((0, 2), (1, 3)))


def test_plan_with_tensor_ranks_becomes_that_of_the_ranks_and_is_shown_as_before():
    plan = predicted(evolve(PLAN, mesh=Mesh(2, 1, tensor=2)))
    found = ranks().planned(plan, MESH)
    assert (found.mesh, found.prediction) == (MESH, None)
    assert ranks().planned(found, MESH) == found
    shown = ranks().shown(found, dict)
    assert shown.mesh == Mesh(2, 1, ((0, 1, 2, 3),), 2)


def test_plan_of_other_ranks_is_refused():
    with pytest.raises(RequestError, match=r"the plan is for pp=2,dp=1,tp=4 and .* pp=2,dp=1,tp=2"):
        ranks().planned(evolve(PLAN, mesh=Mesh(2, 1, tensor=4)), MESH)


def test_shown_prediction_has_the_all_reduces_within_the_measured_times():
    plan = evolve(predicted(PLAN), mesh=MESH)
    cluster = fully_connected(4, 10**9, 1e6, 0.0)
    plan = evolve(plan, prediction=evolve(plan.prediction, cluster=cluster))
    names = [stage.nodes for stage in plan.stages]
    reductions = {node: None for nodes in names for node in nodes}
    assert ranks().shown(plan, lambda: reductions).prediction is None
    reductions[names[0][0]] = TensorReductions(1, 1, forward_bytes=10**5, backward_bytes=10**9)
    first, second = ranks().shown(plan, lambda: reductions).prediction.costs
    assert second.reductions is None
    assert 0 < first.reductions.forward_s < plan.predicted.costs[0].forward_s
    assert first.reductions.backward_s == plan.predicted.costs[0].backward_input_s  # it cannot take longer


@pytest.mark.parametrize(
    ("asked", "fits"),
    [
        (None, True),
        (MeshShape("asked", 2, 1, True, 2), True),
        (Mesh(2, 1, tensor=2), True),
        (MeshShape("asked", 4, 1, True, 2), False),
        (MeshShape("asked", 2, 1, True, 4), False),
        (Mesh(2, 2), False),
    ],
)
def test_mesh_of_the_user_is_that_of_the_ranks(asked, fits):
    if fits:
        ranks().check_mesh(asked, MESH)
    else:
        with pytest.raises(RequestError, match="the ranks of the job are pp=2,dp=1,tp=2: write that, or leave mesh"):
            ranks().check_mesh(asked, MESH)


ROW = [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (0, 1.1, "the loss of microbatch 1 is 1.1 on tensor rank 1 and 1 on tensor rank 0"),
        (1, float("nan"), "the weight of microbatch 1 is nan on tensor rank 1 and 2 on tensor rank 0"),
        (2, 4.0, "a metric of microbatch 1 is 4 on tensor rank 1 and 3 on tensor rank 0"),
    ],
)
def test_results_that_differ_between_tensor_ranks_of_one_batch_are_refused(place, value, said):
    other = [*ROW]
    other[place] = value
    with pytest.raises(RequestError, match=said):
        ranks(2).check_equal(lambda: [[ROW, ROW], [ROW, ROW], [ROW, ROW], [ROW, other]])


def test_rounding_and_other_batches_may_differ():
    nan = [float("nan"), 2.0, 3.0]
    ranks(2).check_equal(lambda: [[ROW], [[1.0 + 1e-5, 2.0, 3.0]], [nan], [nan]])


def test_functions_are_recorded_once():
    found = ranks()
    function = object()
    assert found.step_of(function) is found.step_of(function)
    assert found.step_of(object()) is not found.step_of(function)


def test_unsupported_options_are_refused_with_what_is():
    with pytest.raises(RequestError, match=r"clip_norm is 1.0: not supported for models with DTensor .*; use step\(\)"):
        ranks().refuse("clip_norm is 1.0")


@pytest.fixture
def fake_group():
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_state_of_the_shape_of_the_part_is_divided(fake_group):
    found = ranks(dims={"w": (1, (4, 2))})
    assert found.split == {"w"}
    assert found.split_of("w", (4, 2)) == Split(1, 1, 2)
    assert found.split_of("w", ()) is None  # a counter
    assert found.split_of("b", (4, 2)) is None


def test_model_without_dtensors_has_no_tensor_ranks():
    assert TensorRanks.of(nn.Linear(1, 1), lambda model, batch: None) is None


def operators(written=()):
    step = SimpleNamespace(mutated_buffers=list(written), clamps={})
    return SimpleNamespace(operators=SimpleNamespace(step=step))


def test_written_buffers_are_refused():
    ranks().check([operators(), operators()])
    with pytest.raises(RequestError, match="the step writes the buffer 'mean'"):
        ranks().check([operators(written=["mean"])])


def test_parts_are_joined_along_their_dimension(monkeypatch):
    from panpipe.runtimes.tensor_parallel import tensor_ranks as module

    class Collectives:
        def __init__(self, ranks, group):
            pass

        def gather_parts(self, part):
            return [part, part + 1]

    monkeypatch.setattr(module, "GroupCollectives", Collectives)
    found = ranks().gather(torch.zeros(2, 1), Split(1, 0, 2))
    assert found.tolist() == [[0.0, 1.0], [0.0, 1.0]]
