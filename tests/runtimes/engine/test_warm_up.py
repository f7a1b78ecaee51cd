"""Programs run once on zeros before the first message, where a message occupies the device, and change nothing."""

import copy
from collections import Counter

import pytest
import torch
from panpipe.backends import memcpy
from panpipe.backends.kind import BackendKind
from panpipe.core.capture.regions.regions import Region
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.programs.stage_run import StageRun
from torch import nn

from ...support.cuts import batch_on
from ...support.models import CASES, PYTHON, Case
from ...support.parity import OPTIMIZER, PLANS, build
from ...support.ranks.teams import pipeline_on

EVENTS: list[str] = []


class Occupying(memcpy.MemcpyBackend):
    occupies_device = True

    def send(self, tensors, peer):
        EVENTS.append("message")
        return super().send(tensors, peer)


def occupying(devices):
    exchange = memcpy.Exchange(devices)
    return [Occupying(exchange, device) for device in range(devices)]


OCCUPYING = BackendKind("occupying", "for tests", threads=occupying)


def trained(kind, case, plan):
    pipe = build(ThreadTeam(2, kind), case, torch.float32, 8, None, 4, **PLANS[plan])
    batch = batch_on(CASES[case], 8, torch.float32, "cpu")
    before = torch.get_rng_state()
    losses = [pipe.step(batch).item() for _ in range(3)]
    assert torch.equal(torch.get_rng_state(), before)
    states = [copy.deepcopy(each.state_dict()["state"]) for each in pipe.optimizers.values()]
    gradients = [parameter.grad for parameter in pipe._session.model.parameters()]
    return losses, [*pipe._session.model.parameters(), *pipe._session.model.buffers(), *gradients], states


@pytest.mark.parametrize(
    ("case", "plan"),
    [
        ("tied gpt with dropout", "1f1b"),
        ("tied gpt with dropout", "split backward"),
        ("tied gpt with dropout", "recompute in a v"),
        ("batchnorm with a skip", "interleaved"),
    ],
)
def test_warm_up_runs_before_the_first_message_and_changes_no_bit(case, plan, monkeypatch):
    EVENTS.clear()
    warm_up = StageRun.warm_up

    def noted(self, kinds, *given):
        warm_up(self, kinds, *given)
        EVENTS.append(f"warm-up of {self.index} for {'+'.join(sorted(map(str, kinds)))}")

    monkeypatch.setattr(StageRun, "warm_up", noted)
    losses, tensors, states = trained(OCCUPYING, case, plan)
    warm = Counter(event for event in EVENTS if event != "message")
    stages = 2 * PLANS[plan].get("chunks", 1)
    assert {name.split()[2] for name in warm} == {str(index) for index in range(stages)}
    assert set(warm.values()) == {1}
    wanted_losses, wanted, wanted_states = trained(memcpy.KIND, case, plan)
    assert losses == wanted_losses
    for one, other in zip(tensors, wanted, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(states, wanted_states, strict=True):
        assert all(torch.equal(one[i][key], other[i][key]) for i in one for key in one[i])


@pytest.mark.filterwarnings("ignore")
def test_warm_up_does_not_run_what_stays_python(monkeypatch):
    runs, forward = Counter(), Region.forward

    def counted(self, *given):
        runs[kind.name] += 1
        return forward(self, *given)

    monkeypatch.setattr(Region, "forward", counted)
    for kind in (memcpy.KIND, OCCUPYING):
        pipeline_on(ThreadTeam(2, kind), PYTHON, 6, 3, OPTIMIZER).step(batch_on(PYTHON, 6, torch.float32, "cpu"))
    assert runs["memcpy"] == runs["occupying"] > 0


class Ranked(nn.Module):
    """Sorts early, with positions that count from 1, and restores the order late."""

    def __init__(self):
        super().__init__()
        self.first, self.layers = nn.Linear(16, 16), nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))

    def forward(self, x):
        h = self.first(x)
        order = h.argsort(-1) + 1
        return self.layers(h).gather(-1, order - 1)


def ranked(dtype):
    torch.manual_seed(0)
    return Ranked().to(dtype)


RANKED = Case(ranked, lambda model, batch: (model(batch["x"]) - batch["y"]).square().mean(), PYTHON.batch)


def test_stage_that_indexes_with_received_positions_runs_on_zeros(monkeypatch):
    warm, warm_up = [], StageRun.warm_up

    def noted(self, *given):
        warm_up(self, *given)
        warm.append((self.index, {each.dtype for each in self.boundary}))

    monkeypatch.setattr(StageRun, "warm_up", noted)
    pipeline_on(ThreadTeam(2, OCCUPYING), RANKED, 6, 3, OPTIMIZER).step(batch_on(RANKED, 6, torch.float32, "cpu"))
    assert sorted(warm) == [(0, set()), (1, {torch.float32, torch.int64})]
