"""What captured graphs support, and which stages are left out."""

import pytest
import torch
from attrs import evolve
from panpipe.backends import memcpy
from panpipe.core.errors import RequestError
from panpipe.core.plan.offload import StageOffload
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.programs.graphs.supported import check_device, check_plan, check_sharing
from torch import nn

from ....support.backends.fake_graphs import install
from ....support.models import PYTHON, Case
from ....support.parity import OPTIMIZER
from ....support.plans import scheduled
from ....support.ranks.teams import pipeline_on

PLAN = scheduled("1f1b", 2, 4)


def test_devices_without_graphs_are_refused():
    check_device("cuda")
    with pytest.raises(RequestError, match="needs CUDA devices, and the model would be on cpu: give devices='cuda'"):
        check_device("cpu")


def test_plans_that_send_gradients_early_or_offload_are_refused():
    check_plan(PLAN)
    check_sharing(["none", "optimizer"])
    with pytest.raises(RequestError, match=r"does not support shard='gradients': .* use shard='optimizer'"):
        check_plan(evolve(PLAN, shard=("none", "gradients")))
    with pytest.raises(RequestError, match=r"does not support offload: .* use recompute="):
        check_plan(evolve(PLAN, memory=evolve(PLAN.memory, offload=(StageOffload(0, (), ()),))))


class Masked(nn.Module):
    def forward(self, x):
        return x.index_put((x[:, 0] > 0,), torch.zeros(()))


def model(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), Masked())


CASE = Case(model, lambda model, batch: (model(batch["x"]) - batch["y"]).square().mean(), PYTHON.batch)


def warnings_of(case, monkeypatch, recwarn):
    install(monkeypatch)
    pipe = pipeline_on(ThreadTeam(2, memcpy.KIND), case, 6, 3, OPTIMIZER, graphs=True)
    pipe.step(case.batch(6, torch.float32))
    return [str(each.message) for each in recwarn if "without CUDA graphs" in str(each.message)]


@pytest.mark.filterwarnings("default")
def test_stages_that_read_values_are_left_out_with_a_warning(monkeypatch, recwarn):
    assert warnings_of(CASE, monkeypatch, recwarn) == [
        "stage 1 runs without CUDA graphs: aten.index_put.default with a boolean mask reads values on the host"
    ]


@pytest.mark.filterwarnings("default")
def test_stages_with_python_are_left_out_with_a_warning(monkeypatch, recwarn):
    assert warnings_of(PYTHON, monkeypatch, recwarn) == [
        f"stage {i} runs without CUDA graphs: a part of it stays Python (`panpipe doctor` names the line)"
        for i in range(2)
    ]
