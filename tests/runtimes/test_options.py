"""The arguments of a pipeline: values that are wrong, and arguments that contradict each other."""

import panpipe
import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.runtimes.options import PipelineOptions
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


@pytest.mark.parametrize(("name", "group"), [("memory", "20GB"), ("update", 3), ("run", {})])
def test_group_of_another_type_is_refused(name, group):
    with pytest.raises(RequestError, match=f"{name} is .*: give a panpipe.{name.capitalize()}, as in"):
        panpipe.pipeline(nn.Linear(2, 2), lambda model, x: model(x).sum(), torch.ones(2, 2), **{name: group})


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
