"""Which arguments fit a model with DTensor parameters."""

from types import SimpleNamespace

import attrs
import pytest
import torch
from attrs import evolve, frozen
from panpipe.core.cluster.mesh import parse_mesh
from panpipe.core.errors import RequestError
from panpipe.runtimes.tensor_parallel.options import check_tensor_options, with_replicas
from torch import nn

from ...support.plans import orders, plan_of


@frozen
class Ranks:
    """What the checks use of tensor ranks."""

    data: int = 1
    pipeline_last: bool = False
    parts: nn.Module = attrs.field(factory=lambda: nn.Linear(1, 1))

    def refuse(self, what):
        raise RequestError(what)


def options(**given):
    plain = {"mesh": None, "plan": None, "simulated": False, "devices": SimpleNamespace(given=False)}
    run = SimpleNamespace(**dict.fromkeys(("weights", "compile", "replan", "cuda_graphs")))
    vars(run).update({name: given.pop(name) for name in vars(run) if name in given})
    planning = SimpleNamespace(shard=given.pop("shard", "none"))
    return SimpleNamespace(**{**plain, **given}, run=run, planning=planning)


PLAN = plan_of(orders("0F0 0B0"), (0,))
TENSOR_PLAN = evolve(PLAN, mesh=evolve(PLAN.mesh, tensor=2, data=3, devices=None))


def test_replicas_are_those_of_the_mesh_or_the_plan():
    mesh = parse_mesh("pp=2,dp=3,tp=2", tensor=True)
    assert with_replicas(Ranks(), options(mesh=mesh)).data == 3
    assert with_replicas(Ranks(), options(mesh=parse_mesh("pp=2,tp=2", tensor=True))).data == 1
    assert with_replicas(Ranks(), options(plan=TENSOR_PLAN)).data == 3
    assert with_replicas(Ranks(data=5), options(plan=PLAN)).data == 5
    assert with_replicas(Ranks(data=5), options()).data == 5


def test_plain_arguments_fit_both():
    check_tensor_options(options(), None)
    check_tensor_options(options(), Ranks())
    check_tensor_options(options(mesh=parse_mesh("pp=2", tensor=True), plan=PLAN), None)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"mesh": parse_mesh("pp=2,tp=2", tensor=True)},
            "mesh has 2 tensor ranks at each position and the model has no",
        ),
        ({"plan": TENSOR_PLAN}, "the plan has 2 tensor ranks at each position"),
    ],
)
def test_tensor_ranks_need_a_model_with_dtensors(given, said):
    with pytest.raises(RequestError, match=said):
        check_tensor_options(options(**given), None)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"simulated": True}, "backend is 'simulator'"), ({"devices": SimpleNamespace(given=True)}, "devices is given"),
        ({"shard": "optimizer"}, "shard is 'optimizer' and no plan"), ({"weights": "file"}, "weights is given"),
        ({"compile": "inductor"}, "compile is given"), ({"cuda_graphs": True}, "cuda_graphs is given"),
        ({"replan": "auto"}, "replan is given"),
        ({"plan": evolve(PLAN, shard=("gradients",))}, "the plan has shard 'gradients'"),
    ],
)  # fmt: skip
def test_arguments_that_tensor_ranks_do_not_support_are_refused(given, said):
    with pytest.raises(RequestError, match=said):
        check_tensor_options(options(**given), Ranks())


def test_parameters_are_on_the_processor():
    with pytest.raises(RequestError, match="'weight' is on meta, and not on the CPU"):
        check_tensor_options(options(), Ranks(parts=nn.Linear(1, 1, device=torch.device("meta"))))
