"""Saved tensors that leave and come back: the same bits as without, and the memory that was planned."""

import copy
import random
import re
import time
import warnings

import pytest
import torch
from attrs import evolve
from panpipe.core.errors import RequestError, WorkerError
from panpipe.core.plan.plan import Plan
from panpipe.core.policies.offload import host_slots
from panpipe.core.trace.trace import HOST_MEMORY
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.offload import copies, offloads
from panpipe.runtimes.offload.tier import OffloadTier
from torch import nn

from ...support.cuts import captured_once, even_plan
from ...support.held import simulated
from ...support.models import CASES
from ...support.offloading import all_away
from ...support.parity import OPTIMIZER, PLANS, build
from ...support.programs.offload_features import FEATURES, check, compared
from ...support.ranks.teams import pipeline_on
from ...support.training import case_of

F32 = torch.float32
KINDS = ("saved", HOST_MEMORY)
GPT, CONV = "tied gpt with dropout", "batchnorm with a skip"
OFFLOADING = {
    **{name: options for name, options in PLANS.items() if name != "recompute"},
    "recompute elsewhere": {"chunks": 2, "schedule_name": "interleaved-1f1b", "recompute": (0, 3)},
}
MICROBATCHES = 6


def pair(name: str, rows: int = 12, **options) -> tuple[Plan, Plan]:
    """A plan, and the same with everything away that may be."""
    operators = captured_once(CASES[name], F32, rows, MICROBATCHES)
    plan = even_plan(operators, 2, MICROBATCHES, **options)
    return plan, all_away(plan, operators)


def trained(name, plan, tier=None, steps=2, rows=12):
    """Losses, gradients, parameters and buffers after some steps."""
    pipe = build(ThreadTeam(2), name, F32, rows, plan, MICROBATCHES, offload=tier)
    batch, losses, gradients = CASES[name].batch(rows, F32), [], []
    try:
        for _ in range(steps):
            losses.append(pipe.step(batch).clone())
            gradients += [p.grad.clone() for p in pipe._session.model.parameters() if p.grad is not None]
        state = [value.clone() for value in (*pipe._session.model.parameters(), *pipe._session.model.buffers())]
    finally:
        pipe.close()
    return [*losses, *gradients, *state]


def same(one, other):
    assert len(one) == len(other)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def slow_but(*quick):
    """Parameters of a test: those that are not quick are slow."""
    return lambda *each: pytest.param(*each, marks=() if each in quick else pytest.mark.slow)


SOME = slow_but((GPT, "split backward"), (GPT, "recompute elsewhere"), (CONV, "zb-v"))
QUICK = slow_but(*(
    (feature, "gpipe")
    for feature in (
        "scaled_losses_of_float16", "weighted_losses_and_metrics", "python_regions", "uneven_and_fewer_microbatches",
        "batchnorm_and_evaluation_in_between", "checkpoint_and_resume", "compiled_stages",
    )
))  # fmt: skip


@pytest.mark.filterwarnings("ignore:microbatches of a new shape", "ignore:storage '.*' of stage . is not as captured")
@pytest.mark.parametrize(
    ("feature", "schedule"),
    [QUICK(feature, name) for feature in FEATURES for name in OFFLOADING if name != "recompute elsewhere"],
)
def test_features_have_the_same_bits_on_the_host_and_in_a_file(tmp_path, feature, schedule):
    team = ThreadTeam(2)
    check(compared(team, tmp_path, [feature], [schedule], ["none"]))
    team.close()


@pytest.mark.parametrize(("name", "schedule"), [SOME(name, schedule) for name in CASES for schedule in OFFLOADING])
def test_gradients_have_the_same_bits_as_without_offload(name, schedule):
    plan, away = pair(name, **OFFLOADING[schedule])
    assert away.memory.offload
    same(trained(name, plan), trained(name, away))


@pytest.mark.parametrize("queues", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_copies_delayed_at_random_change_no_bit(monkeypatch, queues):
    """What reads too early, or is freed too early, would find other bytes."""
    drawn = random.Random(0)
    for name in ("write", "read"):
        plain = getattr(copies.MemoryArena, name)

        def late(self, offset, data, plain=plain):
            time.sleep(drawn.random() * 0.002)
            plain(self, offset, data)

        monkeypatch.setattr(copies.MemoryArena, name, late)
    for case, options in ((GPT, PLANS["v-half"]), (CONV, PLANS["split backward"])):
        plan, away = pair(case, **options)
        away = evolve(away, memory=evolve(away.memory, host_copy_queues=queues))
        same(trained(case, plan), trained(case, away))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:microbatches of a new shape")
def test_a_file_that_cannot_grow_refuses_the_larger_batch_alone(tmp_path, monkeypatch):
    _, away = pair(GPT, rows=6)
    pipe, plain = (
        build(ThreadTeam(2), GPT, F32, 6, away, MICROBATCHES, offload=OffloadTier(tmp_path)),
        copies._reserve,
    )
    largest = max(each.bytes for each in pipe._trainer.offloads.values())

    def full(file, size):
        if size > largest:
            raise OSError(28, "No space left on device")
        plain(file, size)

    monkeypatch.setattr(copies, "_reserve", full)
    small, large = (CASES[GPT].batch(rows, F32) for rows in (6, 18))
    pipe.step(small)
    before = [p.detach().clone() for p in pipe._session.model.parameters()]
    with pytest.raises(RequestError, match=rf"in {tmp_path}, and the file cannot be that large \(No space left"):
        pipe.step(large)
    same(before, [p.detach() for p in pipe._session.model.parameters()])
    pipe.step(small)
    assert pipe.metrics.steps == 2
    pipe.close()


@pytest.mark.parametrize("schedule", [pytest.param("gpipe", marks=pytest.mark.slow), "interleaved"])
def test_peaks_on_the_device_and_on_the_host_are_those_of_the_memory_timeline(schedule):
    """Measured by the finalizers of storages, which know nothing of offload."""
    plan, away = pair(GPT, **PLANS[schedule])
    peaks = []
    for each in (plan, away):
        pipe = build(ThreadTeam(2), GPT, F32, 12, each, MICROBATCHES)
        _, trace = pipe.trace_step(CASES[GPT].batch(12, F32))
        wanted = [timeline.peak_saved_bytes for timeline in simulated(each, pipe).timelines]
        found = [{each: [s.bytes for s in trace.memory if (s.device, s.kind) == (device, each)] for each in KINDS}
                 for device in range(2)]  # fmt: skip
        assert [max(own["saved"]) for own in found] == pytest.approx(wanted, rel=0.02)
        on_host = [timeline.host.max() for timeline in simulated(each, pipe).timelines]
        assert [max(own[HOST_MEMORY], default=0) for own in found] == pytest.approx(on_host, rel=0.02)
        assert [own[HOST_MEMORY][-1:] for own in found] == ([[0], [0]] if each is away else [[], []])
        peaks.append(wanted)
        pipe.close()
    assert peaks[1][0] < peaks[0][0]


def test_arena_is_as_large_as_the_plan_says_and_what_stays_is_logged_with_its_reason(caplog):
    _, away = pair(GPT)
    caplog.set_level("INFO", "panpipe")
    pipe = build(ThreadTeam(2), GPT, F32, 12, away, MICROBATCHES)
    pipe.step(CASES[GPT].batch(12, F32))
    for device, each in pipe._trainer.offloads.items():
        assert each.bytes == host_slots(away, device).bytes
    pipe.close()
    assert re.search(r"stage 0: saved tensor '\w+' of \d+ bytes stays on its device: it is smaller", caplog.text)


def test_a_copy_that_fails_ends_the_step_with_its_reason(monkeypatch):
    _, away = pair(GPT)

    def full(self, offset, source):
        raise OSError(28, "No space left on device")

    pipe = build(ThreadTeam(2), GPT, F32, 12, away, MICROBATCHES)
    before = copy.deepcopy(dict(pipe._session.model.named_parameters()))
    with monkeypatch.context() as patch:
        patch.setattr(copies.MemoryArena, "write", full)
        with pytest.raises(WorkerError, match=r"device 0 stopped: .*No space left on device"):
            pipe.step(CASES[GPT].batch(12, F32))
    assert all(torch.equal(before[name], p) for name, p in pipe._session.model.named_parameters())
    pipe.step(CASES[GPT].batch(12, F32))
    pipe.close()


@pytest.mark.parametrize(
    ("tier", "said"),
    [
        (OffloadTier(host_memory=64), r"bytes to host .*, and 64 bytes may be used there \(host_memory\): plan again"),
    ],
)
def test_a_host_with_less_memory_than_planned_is_refused(tier, said):
    _, away = pair(GPT)
    with pytest.raises(RequestError, match=said) as refused:
        build(ThreadTeam(2), GPT, F32, 12, away, MICROBATCHES, offload=tier)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "called"), [("container_bytes", "the container's memory limit"), ("bytes_left", "ul")]
)
def test_a_limit_of_the_process_is_checked_before_the_arena_is_allocated(monkeypatch, name, called):
    monkeypatch.setattr(offloads, name, lambda: 64)
    monkeypatch.setattr(copies.MemoryArena, "__init__", None)
    _, away = pair(GPT)
    with pytest.raises(RequestError, match=rf"64 bytes may be used there \({called}.*host=64\), or give"):
        build(ThreadTeam(2), GPT, F32, 12, away, MICROBATCHES)


def normed_step(model, batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(batch).float().square().mean()


def test_a_storage_that_is_larger_than_its_fake_tensor_stays_on_the_device():
    """The mean of a layer norm of bfloat16 has float32 on the CPU; its fake tensor has bfloat16."""
    case = case_of(
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(4))), normed_step,
        lambda rows, dtype: torch.randn(rows, 8, dtype=dtype, generator=torch.Generator().manual_seed(0)),
    )  # fmt: skip
    operators, found = captured_once(case, F32, 12, MICROBATCHES), []
    plan = even_plan(operators, 2, MICROBATCHES, "gpipe")
    for each in (plan, all_away(plan, operators)):
        pipe = pipeline_on(ThreadTeam(2), case, 12, MICROBATCHES, OPTIMIZER, plan=each)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            losses = [pipe.step(case.batch(12, F32)).clone() for _ in range(2)]
        found.append([*losses, *(p.grad.clone() for p in pipe._session.model.parameters())])
        pipe.close()
    same(*found)
    said = [str(each.message) for each in warned if "stays on the device" in str(each.message)]
    assert len(said) == len(set(said)) > 0
    assert all(re.match(r"storage '.*layer_norm.*' of stage \d is not as captured", each) for each in said)


def test_a_storage_that_no_stage_has_is_refused():
    _, away = pair(GPT)
    first = away.memory.offload[0]
    wrong = evolve(first, storages=(evolve(first.storages[0], name="nothing"), *first.storages[1:]))
    plan = evolve(away, memory=evolve(away.memory, offload=(wrong,)))
    with pytest.raises(RequestError, match="offloads 'nothing' of stage 0, which has no saved tensor of that name"):
        build(ThreadTeam(2), GPT, F32, 12, plan, MICROBATCHES)
