"""The arguments of a pipeline: values that are wrong, and arguments that contradict each other."""

import pytest
import torch
from panpipe.core.cluster.mesh import Mesh
from panpipe.core.errors import RequestError
from panpipe.core.plan.plan import plan_json
from panpipe.runtimes.optimizer.training import Training
from panpipe.runtimes.options import DeviceOptions, PipelineOptions, given_mesh, given_plan
from panpipe.runtimes.planning.options import PlanningOptions
from torch import nn

from ..support.plans import scheduled

PLAN = scheduled("1f1b", 2, 4)


def planning(**given):
    return PlanningOptions(oracle=None, cut_oracle=None, **given)


def options(**given):
    given.setdefault("training", Training(optimizer=torch.optim.SGD))
    return PipelineOptions(planning=planning(), **{"plan": "auto", **given})


def test_plans_by_value_and_by_file(tmp_path):
    assert given_plan("auto") is None
    assert given_plan(PLAN) is PLAN
    (tmp_path / "plan.json").write_text(plan_json(PLAN))
    assert given_plan(tmp_path / "plan.json") == PLAN
    with pytest.raises(RequestError, match="plan is 3: give 'auto', a Plan, or the path of a plan file"):
        given_plan(3)


def test_mesh_is_given_as_number_text_or_object():
    assert given_mesh(None) is None
    assert given_mesh(2) == given_mesh("pp=2")
    assert given_mesh(Mesh(2, 2)) == Mesh(2, 2)
    with pytest.raises(RequestError):
        given_mesh("pp=x")


def test_number_of_microbatches_is_given_or_that_of_the_plan():
    assert options().microbatches == 8
    assert options(microbatches=3).microbatches == 3
    assert options(plan=PLAN).microbatches == 4
    assert options(plan=PLAN, microbatches=4).plan is PLAN


REFUSED = {
    "target": ({"target": "moon"}, "there is no target 'moon': known are devices, simulator"),
    "microbatches": ({"microbatches": 0}, "microbatches is 0: give a whole number, at least 1"),
    "microbatches of another type": ({"microbatches": 2.5}, "microbatches is 2.5: give a whole number, at least 1"),
    "mesh of another type": ({"mesh": 2.5}, "mesh is 2.5: give a whole number, at least 1"),
    "other microbatches": ({"plan": PLAN, "microbatches": 5}, "5"),
    "replan in the simulator": (
        {"target": "simulator", "replan": "auto"}, "replan is 'auto', but simulated devices never drift"),
    "shard without an optimizer": (
        {"shard": "optimizer", "training": Training()}, "shard= is given without optimizer=: it divides the optimizer"),
    "shard": ({"shard": "everything"}, "everything"),
    "mesh of the plan": ({"plan": PLAN, "mesh": "pp=3"}, "3"),
    "compile in the simulator": (
        {"target": "simulator", "compile": "inductor"}, "compile is 'inductor', but target 'simulator' takes"),
}  # fmt: skip


@pytest.mark.parametrize(("given", "reason"), REFUSED.values(), ids=REFUSED)
def test_wrong_arguments_are_refused(given, reason):
    with pytest.raises(RequestError, match=reason):
        options(**given)


def test_boundaries_of_a_given_plan_are_refused():
    with pytest.raises(RequestError, match="boundaries is 'layers', but the given plan already has its stages"):
        PipelineOptions(training=Training(), planning=planning(boundaries="layers"), plan=PLAN)


def test_simulated_pipelines_are_on_the_host():
    found = options(target="simulator")
    assert found.simulated
    assert not options().simulated
    assert found.check(nn.Linear(2, 2)) == "cpu"


def test_type_of_devices_is_given_or_that_of_the_model():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert not DeviceOptions().given
    assert (DeviceOptions().type_with(cpu), DeviceOptions().type_with(cuda)) == ("cpu", "cuda")
    named = DeviceOptions(["cpu", "cpu"])
    assert named.given
    assert named.named == (cpu, cpu)
    assert named.type_with(cuda) == "cpu"


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"target": "simulator"}, "captures what GPUs run, and target 'simulator' has none: leave cuda_graphs out"),
        ({"offload": "auto"}, "does not support offload: .* use recompute=, or leave cuda_graphs out"),
        ({"shard": "parameters"}, "does not support shard='parameters': .* use shard='optimizer'"),
    ],
)
def test_cuda_graphs_refuse_what_they_do_not_support(given, refused):
    with pytest.raises(RequestError, match=refused):
        options(cuda_graphs=True, **given)


def test_cuda_graphs_need_cuda():
    found = options(cuda_graphs=True, shard="optimizer", offload="none")
    with pytest.raises(RequestError, match="needs CUDA devices, and the model would be on cpu: give devices='cuda'"):
        found.check(nn.Linear(2, 2))
