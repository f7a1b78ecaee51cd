"""Building a pipeline: what is refused, in one line with value, rule and fix; and an automatic plan, whole."""

import panpipe
import pytest
import torch
import torch.distributed as dist
from attrs import evolve
from panpipe.core.cluster.mesh import Mesh
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import find_family
from panpipe.core.search.problem.assemble import assemble
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from ..laws.grouped import grouped
from ..support.cuts import captured_once, even_plan
from ..support.models import CASES
from ..support.plans import scheduled

NAME = "batchnorm with a skip"
F32 = torch.float32


def build(rows: int = 8, **options):
    case = CASES[NAME]
    return panpipe.pipeline(
        case.model(F32), case.step, case.batch(rows, F32), **grouped(**{"microbatches": 4, **options})
    )


def plan(devices: int = 2):
    return even_plan(captured_once(CASES[NAME], F32, 8, 4), devices, 4)


@pytest.mark.parametrize(("name", "group"), [("memory", "20GB"), ("update", 3), ("run", {})])
def test_group_of_another_type_is_refused(name, group):
    with pytest.raises(panpipe.RequestError, match=f"{name} is .*: give a panpipe.{name.capitalize()}, as in"):
        panpipe.pipeline(nn.Linear(2, 2), lambda model, x: model(x).sum(), torch.ones(2, 2), **{name: group})


VIRTUAL = {"backend": "simulator", "devices": "2xA100-40GB"}
GRAPHS = {"cuda_graphs": True, "optimizer": torch.optim.SGD}
SCHEDULED = scheduled("1f1b", 2, 4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rows": 3}, "3 samples for 4 microbatches.*at most 3 microbatches"),
        ({"microbatches": 0}, "microbatches is 0: give a whole number, at least 1"),
        ({"microbatches": 2.5}, "microbatches is 2.5: give a whole number, at least 1"),
        ({"mesh": 2.5}, "mesh is 2.5: give a whole number, at least 1"),
        ({"plan": SCHEDULED, "microbatches": 5}, "5"),
        ({"plan": SCHEDULED, "mesh": "pp=3"}, "3"),
        ({"replan": "auto", **VIRTUAL}, "replan is 'auto', but simulated devices never drift"),
        ({"compile": "inductor", **VIRTUAL}, "compile is 'inductor', but backend 'simulator' takes"),
        ({"shard": "optimizer"}, r"Memory\(shard=\) is given without optimizer="),
        ({"shard": "everything"}, "everything"),
        ({**GRAPHS, **VIRTUAL}, "captures what GPUs run, and backend 'simulator' has none: leave cuda_graphs out"),
        ({**GRAPHS, "offload": "auto"}, "does not support offload: .* use Memory.recompute=., or leave cuda_graphs"),
        ({**GRAPHS, "shard": "parameters"}, "does not support shard='parameters': .* use Memory.shard='optimizer'"),
        (GRAPHS, "needs CUDA devices, and the model would be on cpu: give devices='cuda'"),
        ({"mesh": "pp=99"}, r"99 stages for \d+ operators.*use at most"),
        ({"mesh": "four"}, "'four' is not a mesh"),
        ({"mesh": "pp=2,dp=2"}, "2 replicas in one process.*torchrun --nproc-per-node 4"),
        (
            {"mesh": "pp=2,dp=2", "backend": "simulator", "devices": "2xA100-40GB"},
            "trains one replica and the mesh has 2",
        ),
        ({"mesh": "pp=2,dp=0"}, "has dp=0: give every dimension once, at least 1"),
        ({"mesh": "pp=2,tp=2"}, "mesh has 2 tensor ranks at each position and the model has no DTensor parameters"),
        ({"mesh": 0}, "mesh is 0: give a whole number, at least 1"),
        ({"backend": "gloo"}, "torchrun"),
        ({"backend": "carrier pigeon"}, "no backend 'carrier pigeon': known are memcpy, gloo"),
        ({"schedule": "perfect"}, "no schedule 'perfect'"),
        ({"optimizer": 3}, "optimizer is 3"),
        *(({"clip_norm": norm}, f"clip_norm is {norm!r}: gradients are clipped to") for norm in (0, -1.0, "1", True)),
        ({"clip_norm": float("nan")}, "clip_norm is nan"),
        *(({"timeout_s": time}, "timeout_s is .*: give a finite number") for time in (True, "5", b"5", 10**400, -1)),
        *(
            ({"scaler": each}, "scaler is .*: losses are scaled by .*give one, such as torch.amp.GradScaler")
            for each in (2.0, True, "dynamic")
        ),
        ({"scheduler": 3}, "scheduler is 3: give a function of an optimizer"),
        ({"scheduler": lambda optimizer: None}, "a scheduler needs an optimizer; give both"),
        ({"plan": "/nowhere/plan.json"}, "cannot read '/nowhere/plan.json'"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(options, said):
    with pytest.raises(panpipe.RequestError, match=said) as refusal:
        build(**options)
    assert "\n" not in str(refusal.value)


def test_a_plan_for_another_model_is_refused():
    other = even_plan(captured_once(CASES["tied gpt with dropout"], F32, 8, 4), 2, 4)
    with pytest.raises(panpipe.RequestError, match=r"the plan was made for 'TinyGPT'.*plan again"):
        build(plan=other)


def test_a_plan_edited_into_a_deadlock_is_refused():
    good = plan()
    first, second = good.device_actions
    with pytest.raises(panpipe.RequestError):
        build(plan=evolve(good, device_actions=(first, second[1:] + second[:1])))


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        (Mesh(2, 2), "a mesh of 2 replicas in one process: .*torchrun --nproc-per-node 4"),
        (Mesh(2, 1, ((1, 0),)), r"the plan uses the devices \[1, 0\] of its cluster: threads are its devices"),
    ],
)
def test_a_mesh_that_threads_do_not_have_is_refused(mesh, said):
    with pytest.raises(panpipe.RequestError, match=said) as refusal:
        build(plan=evolve(plan(), mesh=mesh))
    assert "\n" not in str(refusal.value)


def test_plan_with_tensor_ranks_is_refused():
    with pytest.raises(
        panpipe.RequestError, match=r"the plan has 2 tensor ranks at each position and the model has no"
    ):
        build(plan=evolve(plan(), mesh=Mesh(2, 1, tensor=2)))


def test_model_over_the_fake_process_group_is_refused():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        parallelize_module(model, init_device_mesh("cpu", (2,)), {"1": ColwiseParallel()})
        with pytest.raises(panpipe.RequestError, match=r"'1\.weight' is a DTensor over torch's fake process group"):
            panpipe.pipeline(model, lambda m, batch: m(batch).mean(), torch.randn(4, 4), microbatches=2)
    finally:
        dist.destroy_process_group()


def test_unused_parameter_is_warned_of_and_keeps_no_gradient():
    class Extra(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.also, self.pooler = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.also(self.used(x))

    model, batch = Extra(), torch.ones(4, 4)
    from panpipe.core.capture.export.operators import operators_of
    from panpipe.core.capture.export.step import capture_step

    def step(model, batch):
        return model(batch).pow(2).mean()

    graph = operators_of(capture_step(model, step, batch[:2])).graph
    names = [node.name for node in graph.nodes]
    schedule = find_family("1f1b").build(ScheduleProblem(2, 2))
    with pytest.warns(UserWarning, match="pooler.weight, pooler.bias"):
        pipe = panpipe.pipeline(model, step, batch, plan=assemble(graph, [names[:1], names[1:]], schedule))
    pipe.step(batch)
    assert model.pooler.weight.grad is None
    assert model.used.weight.grad is not None


def test_an_automatic_plan_trains_and_its_file_trains_again(tmp_path):
    case = CASES[NAME]
    pipe = build(optimizer=torch.optim.SGD)
    assert pipe.plan.prediction.step_s > 0
    before = {name: buffer.clone() for name, buffer in case.model(F32).named_buffers()}
    assert all(torch.equal(b, before[n]) for n, b in pipe._session.model.named_buffers())  # profiles leave no trace
    first = [pipe.step(case.batch(8, F32)).item() for _ in range(3)]
    path = tmp_path / "plan.json"
    path.write_text(panpipe.plan_json(pipe.plan), encoding="utf-8")
    again = build(optimizer=torch.optim.SGD, plan=path)
    assert [again.step(case.batch(8, F32)).item() for _ in range(3)] == first


def test_the_traced_peak_of_saved_tensors_is_the_predicted_one():
    case = CASES["tied gpt with dropout"]
    pipe = panpipe.pipeline(
        case.model(F32), case.step, case.batch(8, F32), microbatches=4, plan=panpipe.Auto(contest=False)
    )
    predicted = panpipe.simulate(pipe.plan).peak_saved_bytes
    _, trace = pipe.trace_step(case.batch(8, F32))
    for device, wanted in enumerate(predicted):
        measured = max(s.bytes for s in trace.memory if s.device == device and s.kind == "saved")
        assert measured == pytest.approx(wanted, rel=0.05)


def test_a_model_put_into_another_mode_is_refused():
    pipe = build(plan=plan())
    batch = CASES[NAME].batch(8, F32)
    pipe.step(batch)
    pipe._session.model.eval()
    with pytest.raises(panpipe.RequestError, match="the model is in evaluation mode and was captured in training"):
        pipe.step(batch)
    pipe._session.model.train()
    pipe.step(batch)


@pytest.mark.parametrize(
    "wrong", [{"optimizer": "adam"}, {"scheduler": lambda optimizer: optimizer}, {"devices": "no-such-device"}]
)
def test_wrong_arguments_are_refused_before_the_step_is_traced(wrong):
    def step(model, batch):
        pytest.fail("the step ran")

    with pytest.raises(panpipe.RequestError):
        panpipe.pipeline(nn.Linear(4, 4), step, torch.randn(4, 4), **grouped(mesh=2, progress=False, **wrong))


def test_pipeline_trains_under_the_anomaly_mode_with_a_warning():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    batch = {"x": torch.randn(4, 4), "y": torch.randn(4, 4)}
    options = {"optimizer": None, "schedule": "1f1b", "microbatches": 2, "progress": False}

    def step(model, batch):
        return nn.functional.mse_loss(model(batch["x"]), batch["y"])

    with torch.autograd.set_detect_anomaly(True):
        with pytest.warns(UserWarning, match="anomaly mode sees nothing"):
            pipe = panpipe.pipeline(model, step, batch, **grouped(**options))
        assert torch.isfinite(pipe.step(batch))
    pipe.close()
