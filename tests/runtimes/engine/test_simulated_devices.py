"""The simulator as a target: the results of threads, the times of the simulator, and memory as predicted."""

import panpipe
import pytest
import torch
from attrs import evolve
from panpipe.core.actions import parse_action
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.cluster.mesh import Mesh
from panpipe.core.plan.plan import Prediction
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.pipeline import Pipeline
from panpipe.simulators.run import simulate
from torch import nn

from ...laws.grouped import grouped
from ...support.cuts import captured_once, even_plan
from ...support.held import costs_of
from ...support.models import CASES, PYTHON, Case
from ...support.offloading import all_away
from ...support.parity import build
from ...support.plans import hosted

F32 = torch.float32
GPT, CONV, WEIGHTED = CASES


def with_costs(pipe: Pipeline) -> panpipe.Plan:
    """The pipeline's plan, with the memory of its own programs and uneven times."""
    costs = [
        evolve(costs_of(pipe._session.programs[i].memory), forward_s=1.0 + i % 3, backward_input_s=1.5, optimizer_s=0.5)
        for i in range(len(pipe.plan.stages))
    ]
    devices = pipe.plan.devices
    nothing = (0.0,) * devices
    cluster = hosted(fully_connected(devices, 10**9, 4096.0, 0.25), 8192.0, 0.25)
    return evolve(pipe.plan, prediction=Prediction(tuple(costs), cluster, 0.0, nothing, nothing, 0.0))


def same(threads, simulated):
    for (name, ours), theirs in zip(
        simulated._session.model.named_parameters(), threads._session.model.parameters(), strict=True
    ):
        assert torch.equal(ours.grad, theirs.grad), name
        assert torch.equal(ours, theirs), name
    for (name, ours), theirs in zip(
        simulated._session.model.named_buffers(), threads._session.model.buffers(), strict=True
    ):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize(
    ("name", "devices", "options"),
    [
        (GPT, 2, {}),
        (GPT, 2, {"schedule_name": "zb-v", "chunks": 2}),
        (CONV, 3, {"recompute": None}),
        (CONV, 3, {"split": True}),
        (WEIGHTED, 2, {"schedule_name": "interleaved-1f1b", "chunks": 2, "recompute": (1,)}),
        (GPT, 2, {"schedule_name": "gpipe", "offload": True}),
        (CONV, 2, {"split": True, "offload": True}),
    ],
)
def test_simulated_step_has_the_results_of_threads_and_the_predicted_time_and_memory(name, devices, options):
    case, offload = CASES[name], options.get("offload", False)
    operators = captured_once(case, F32, 8, 4)
    plan = even_plan(operators, devices, 4, **{key: value for key, value in options.items() if key != "offload"})
    plan = all_away(plan, operators) if offload else plan
    threads = build(ThreadTeam(devices), name, F32, 8, plan, 4)
    plan = with_costs(threads)

    simulated = build(ThreadTeam(devices), name, F32, 8, plan, 4, clock=lambda _: simulate(plan).trace)
    for _ in range(2):
        batch = case.batch(8, F32)
        assert torch.equal(simulated.step(batch), threads.step(batch))
        assert simulated.metrics == threads.metrics
    same(threads, simulated)
    assert simulated.trace_step(batch)[1] == simulate(plan).trace


def layers(count):
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(count) for layer in (nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh())))


def square(model, batch):
    return model(batch).square().mean()


@pytest.mark.slow
def test_one_process_trains_on_sixteen_virtual_devices_of_a_catalogue_cluster():
    batch = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    options = {"optimizer": torch.optim.SGD, "seed": 3}
    case = Case(lambda dtype: layers(16), square, lambda rows, dtype: batch)
    plan = even_plan(captured_once(case, F32, 32, 32), 16, 32)
    stages = tuple(evolve(stage, device=0) for stage in plan.stages)
    alone = evolve(plan, mesh=Mesh(1), stages=stages, device_actions=(one_after_the_other(16, 32),))
    reports = []
    options["monitor"] = reports.append
    simulated = panpipe.pipeline(
        layers(16), square, batch, **grouped(plan=plan, backend="simulator", devices="2x8xA100-80GB", **options)
    )
    one = panpipe.pipeline(layers(16), square, batch, **grouped(plan=alone, **options))
    assert [simulated.step(batch).item() for _ in range(2)] == [one.step(batch).item() for _ in range(2)]
    same(one, simulated)
    peaks = [each.saved_peak_bytes for each in reports[0].devices]
    assert peaks == list(simulate(with_costs(simulated)).peak_saved_bytes)


def one_after_the_other(stages, microbatches):
    """Of each microbatch all forwards, then all backwards."""
    return tuple(
        parse_action(f"{stage}{kind}{m}")
        for m in range(microbatches)
        for kind, order in (("F", range(stages)), ("B", range(stages - 1, -1, -1)))
        for stage in order
    )


def conv(**options):
    case = CASES[CONV]
    plan = even_plan(captured_once(case, F32, 8, 4), 2, 4)
    return panpipe.pipeline(
        case.model(F32), case.step, case.batch(8, F32), **grouped(**{"plan": plan, "backend": "simulator", **options})
    )


def test_automatic_plan_on_virtual_devices_takes_the_predicted_time():
    pipe = conv(plan="auto", schedule="1f1b", max_chunks=1, microbatches=4, devices="2xA100-40GB", recompute="all")
    assert pipe.plan.memory.recompute == (0, 1)
    assert pipe.trace_step(CASES[CONV].batch(8, F32))[1] == simulate(pipe.plan).trace


def test_plan_without_costs_is_timed_with_analytic_costs():
    slow, fast = (
        conv(devices=devices).trace_step(CASES[CONV].batch(8, F32))[1] for devices in ("2xA100-40GB", "2xH100")
    )
    assert 0 < fast.step_s < slow.step_s < 0.01


def test_virtual_devices_run_batches_of_other_sizes():
    """Fewer samples than microbatches, and the next step is whole again."""
    pipe, threads = conv(devices="2xA100-40GB"), conv(backend=None)
    for rows in (3, 8):
        batch = CASES[CONV].batch(rows, F32)
        assert torch.equal(pipe.step(batch), threads.step(batch))
    assert pipe.trace_step(CASES[CONV].batch(3, F32))[1].events


def test_untraced_regions_run_on_virtual_devices():
    plan = even_plan(captured_once(PYTHON, F32, 8, 4), 2, 4)
    both = [
        panpipe.pipeline(
            PYTHON.model(F32), PYTHON.step, PYTHON.batch(8, F32), **grouped(plan=plan, backend=backend, **options)
        )
        for backend, options in ((None, {}), ("simulator", {"devices": "2xA100-40GB"}))
    ]
    losses = [pipe.step(PYTHON.batch(8, F32)) for pipe in both]
    assert torch.equal(*losses)
    same(*both)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "the plan of 'ConvNet' has none: give devices=, such as"),
        ({"plan": "auto"}, "plan='auto' needs one: give devices="),
        ({"devices": "1xA100-40GB"}, "the plan needs 2 devices and the cluster has 1"),
        ({"devices": fully_connected(2, 10**9, 1e9, 0.0)}, "device 'device0' of the cluster has no type"),
        ({"devices": "2xA100-40GB", "plan": "auto", "mesh": 4}, "mesh has 4 devices and the cluster 2"),
        ({"devices": "2xA100-40GB", "plan": "auto", "recompute": [9]}, "recompute names stage 9"),
    ],
)
def test_options_that_virtual_devices_refuse(options, said):
    with pytest.raises(panpipe.RequestError, match=said) as refusal:
        conv(**options)
    assert "\n" not in str(refusal.value)


def test_virtual_devices_under_torchrun_are_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(panpipe.RequestError, match="one of 2 ranks: start the script without torchrun"):
        conv(devices="2xA100-40GB")
