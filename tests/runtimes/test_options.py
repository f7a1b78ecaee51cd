"""The arguments of a pipeline: values that are wrong, and arguments that contradict each other."""

import panpipe
import pytest
import torch
from attrs import evolve
from panpipe.core.cluster.mesh import Mesh
from panpipe.core.errors import RequestError
from panpipe.core.plan.plan import plan_json
from panpipe.runtimes.options import DeviceOptions, PipelineOptions, given_mesh, given_plan
from panpipe.runtimes.settings import Auto, Memory, PlanningOptions
from panpipe.runtimes.update.training import Training
from torch import nn

from ..laws.grouped import grouped
from ..support.plans import scheduled

PLAN = scheduled("1f1b", 2, 4)


def options(**given):
    groups = {"training": Training(optimizer=torch.optim.SGD)} | grouped(**given)
    planning = PlanningOptions.of(Auto(), groups.pop("memory", Memory()), oracle=None, cut_oracle=None)
    return PipelineOptions(planning=planning, **groups)


def test_plans_by_name_value_and_file(tmp_path):
    assert given_plan("auto") == (None, Auto())
    assert given_plan("1f1b") == (None, Auto(schedule="1f1b"))
    assert given_plan(Auto(max_chunks=1)) == (None, Auto(max_chunks=1))
    assert given_plan(PLAN)[0] is PLAN
    (tmp_path / "plan.json").write_text(plan_json(PLAN))
    assert given_plan(tmp_path / "plan.json")[0] == PLAN
    with pytest.raises(RequestError, match=r"plan is 3: give 'auto', the name of a schedule, a panpipe.Auto"):
        given_plan(3)
    with pytest.raises(RequestError, match="no schedule '1f1bb': did you mean 1f1b"):
        given_plan("1f1bb")


@pytest.mark.parametrize(("name", "group"), [("memory", "20GB"), ("update", 3), ("run", {})])
def test_group_of_another_type_is_refused(name, group):
    with pytest.raises(RequestError, match=f"{name} is .*: give a panpipe.{name.capitalize()}, as in"):
        panpipe.pipeline(nn.Linear(2, 2), lambda model, x: model(x).sum(), torch.ones(2, 2), **{name: group})


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
    "microbatches": ({"microbatches": 0}, "microbatches is 0: give a whole number, at least 1"),
    "microbatches of another type": ({"microbatches": 2.5}, "microbatches is 2.5: give a whole number, at least 1"),
    "mesh of another type": ({"mesh": 2.5}, "mesh is 2.5: give a whole number, at least 1"),
    "other microbatches": ({"plan": PLAN, "microbatches": 5}, "5"),
    "replan in the simulator": (
        {"backend": "simulator", "replan": "auto"}, "replan is 'auto', but simulated devices never drift"),
    "shard without an optimizer": (
        {"shard": "optimizer", "training": Training()}, r"Memory\(shard=\) is given without optimizer="),
    "shard": ({"shard": "everything"}, "everything"),
    "mesh of the plan": ({"plan": PLAN, "mesh": "pp=3"}, "3"),
    "compile in the simulator": (
        {"backend": "simulator", "compile": "inductor"}, "compile is 'inductor', but backend 'simulator' takes"),
}  # fmt: skip


@pytest.mark.parametrize(("given", "reason"), REFUSED.values(), ids=REFUSED)
def test_wrong_arguments_are_refused(given, reason):
    with pytest.raises(RequestError, match=reason):
        options(**given)


def test_limit_of_memory_holds_for_a_given_plan():
    assert options(plan=PLAN, limit="1GB").plan is PLAN
    with pytest.raises(RequestError, match="the given plan has no prediction of its memory: plan again"):
        options(plan=evolve(PLAN, prediction=None), limit="1GB")


def test_simulated_pipelines_are_on_the_host():
    found = options(backend="simulator")
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
        ({"backend": "simulator"}, "captures what GPUs run, and backend 'simulator' has none: leave cuda_graphs out"),
        ({"offload": "auto"}, "does not support offload: .* use Memory.recompute=., or leave cuda_graphs out"),
        ({"shard": "parameters"}, "does not support shard='parameters': .* use Memory.shard='optimizer'"),
    ],
)
def test_cuda_graphs_refuse_what_they_do_not_support(given, refused):
    with pytest.raises(RequestError, match=refused):
        options(cuda_graphs=True, **given)


def test_cuda_graphs_need_cuda():
    found = options(cuda_graphs=True, shard="optimizer", offload="none")
    with pytest.raises(RequestError, match="needs CUDA devices, and the model would be on cpu: give devices='cuda'"):
        found.check(nn.Linear(2, 2))
