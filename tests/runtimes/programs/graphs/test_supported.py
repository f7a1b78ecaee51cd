"""What captured graphs support, and which stages are left out."""

import threading
import time

import pytest
import torch
from attrs import evolve
from panpipe.backends import memcpy
from panpipe.core.errors import RequestError
from panpipe.runtimes.engine.executor import Executor
from panpipe.runtimes.engine.step_graphs import StepGraphs
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.programs.graphs.graph_pool import check_plan
from panpipe.runtimes.programs.stage_run import StageRun
from torch import nn

from ....support.backends.fake_graphs import install
from ....support.models import CASES, PYTHON, Case
from ....support.parity import OPTIMIZER
from ....support.ranks.teams import pipeline_on


def test_plans_that_send_gradients_early_or_offload_are_refused():
    check_plan(["none", "optimizer"], offloads=False)
    with pytest.raises(RequestError, match=r"does not support shard='gradients': .* use Memory.shard='optimizer'"):
        check_plan(["none", "gradients"], offloads=False)
    with pytest.raises(RequestError, match=r"does not support offload: .* use Memory.recompute="):
        check_plan(["none"], offloads=True)


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
        "stage 1 runs without CUDA graphs, as do all of its device: aten.index_put.default with a boolean mask reads "
        "values on the host"
    ]


@pytest.mark.filterwarnings("default")
def test_stages_with_python_are_left_out_with_a_warning(monkeypatch, recwarn):
    assert warnings_of(PYTHON, monkeypatch, recwarn) == [
        f"stage {i} runs without CUDA graphs, as do all of its device: a part of it stays Python (`panpipe doctor` "
        "names the line)"
        for i in range(2)
    ]


@pytest.mark.filterwarnings("ignore")
def test_no_device_runs_before_all_devices_have_captured(monkeypatch):
    events, capture, forward = [], StepGraphs._capture, StageRun.forward

    def slow(self, frame):
        time.sleep(0.1)
        found = capture(self, frame)
        events.append("captured")
        return found

    def noted(self, *given):
        events.append(self.index)
        return forward(self, *given)

    def masked_first(dtype):
        torch.manual_seed(0)
        return nn.Sequential(Masked(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))

    monkeypatch.setattr(StepGraphs, "_capture", slow)
    monkeypatch.setattr(StageRun, "forward", noted)
    install(monkeypatch)
    pipe = pipeline_on(ThreadTeam(2, memcpy.KIND), evolve(CASE, model=masked_first), 6, 3, OPTIMIZER, graphs=True)
    pipe.step(CASE.batch(6, torch.float32))
    pipe.close()
    assert events[events.index("captured") + 1 :] == [0, 0, 0]


def test_devices_that_share_a_gpu_capture_and_warm_up_one_after_another(monkeypatch):
    inside, most = set(), []

    def alone(method):
        def run(*given):
            inside.add(threading.get_ident())
            most.append(len(inside))
            time.sleep(0.05)
            try:
                return method(*given)
            finally:
                inside.discard(threading.get_ident())

        return run

    monkeypatch.setattr(StepGraphs, "_capture", alone(StepGraphs._capture))
    monkeypatch.setattr(Executor, "_warm_up", alone(Executor._warm_up))
    install(monkeypatch)
    case = CASES["tied gpt with dropout"]
    with pipeline_on(ThreadTeam(2, memcpy.KIND), case, 8, 4, OPTIMIZER, graphs=True) as pipe:
        pipe.step(case.batch(8, torch.float32))
    assert most == [1] * 4
