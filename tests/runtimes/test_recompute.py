"""Stages that recompute: what they hold, what they draw, and what they write."""

import panpipe
import pytest
import torch
from panpipe.runtimes.launch.team import ThreadTeam
from torch import nn
from torch.nn import functional as F

from ..support.cuts import captured, even_plan
from ..support.held import measured, predicted, simulated
from ..support.models import CASES, PYTHON
from ..support.parity import build
from ..support.training import case_of, gradients, pipeline_of, unequal

F32 = torch.float32
PLANS = {
    "all recompute": {"recompute": None},
    "the last recomputes": {"recompute": (1,), "split": True},
    "v": {"schedule_name": "zb-v", "chunks": 2},
    "v recomputes": {"schedule_name": "zb-v", "chunks": 2, "recompute": None},
    "looped recomputes": {"schedule_name": "looped", "chunks": 2, "recompute": None},
}


def traced(name, options):
    case = CASES[name]
    plan = even_plan(captured(case, F32, 8, 4), 2, 4, **PLANS[options])
    pipe = build(ThreadTeam(2), name, F32, 8, plan, 4)
    pipe.step(case.batch(8, F32))
    return pipe, pipe.trace_step(case.batch(8, F32))[1]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tied gpt with dropout", "the last recomputes"),
        ("token-weighted", "v"),
        ("batchnorm with a skip", "all recompute"),
        ("batchnorm with a skip", "looped recomputes"),
        ("batchnorm with a skip", "v recomputes"),
    ],
)
def test_saved_tensors_after_every_action_are_as_predicted(name, options):
    pipe, trace = traced(name, options)
    assert measured(trace) == predicted(simulated(pipe.plan, pipe))


def test_tensors_shared_by_stages_of_one_device_are_predicted_for_each():
    """A tensor between stages 1 and 2 that both save counts twice; one that still waits for its reader is
    communication."""
    pipe, trace = traced("batchnorm with a skip", "v")
    result = simulated(pipe.plan, pipe)
    found, wanted, most = measured(trace), predicted(result), predicted(result, passed=True)
    assert found[0] == wanted[0]
    assert found[1] != wanted[1]
    assert all(here <= there for (_, here), (_, there) in zip(found[1], most[1], strict=True))


class PowerIteration(nn.Module):
    """Divides by a norm that a buffer follows: each forward reads the buffer that the one before has written."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("direction", torch.ones(8) / 8**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.direction.copy_(F.normalize(self.linear.weight @ self.direction, dim=0))
        return (self.linear(x) * self.direction.sum()).tanh()


POWER = case_of(
    lambda: nn.Sequential(*(PowerIteration() for _ in range(3))), lambda model, batch: model(batch).square().mean(),
    lambda rows, dtype: torch.randn(rows, 8, dtype=dtype, generator=torch.Generator().manual_seed(1)),
)  # fmt: skip


@pytest.mark.parametrize("case", [POWER, PYTHON], ids=["buffer", "python"])
def test_recompute_reads_old_buffers_and_writes_none(case):
    found = []
    for options in ({}, {"recompute": None}):
        pipe, _ = pipeline_of(case, 8, 4, plan_options=options)
        losses = [pipe.step(case.batch(8, F32)).item() for _ in range(2)]
        found.append((losses, gradients(pipe._session.model) | dict(pipe._session.model.named_buffers())))
    assert pipe.plan.memory.recompute == (0, 1)
    assert found[0][0] == found[1][0]
    assert unequal(found[0][1], found[1][1]) == []


def test_automatic_plan_recomputes_the_given_stages():
    case = CASES["batchnorm with a skip"]
    pipe = panpipe.pipeline(
        case.model(F32),
        case.step,
        case.batch(8, F32),
        microbatches=4,
        plan=panpipe.Auto(schedule="1f1b", max_chunks=1),
        memory=panpipe.Memory(recompute="all"),
    )
    assert pipe.plan.memory.recompute == (0, 1)
    costs = pipe.plan.prediction.costs
    assert all(cost.recompute_s is not None for cost in costs)
    assert pipe.plan.prediction.peak_saved_bytes[0] == costs[0].saved_bytes + costs[0].input_bytes
    assert panpipe.simulate(pipe.plan).step_s == pytest.approx(pipe.plan.prediction.step_s)


@pytest.mark.parametrize(
    ("recompute", "said"),
    [
        ("some", "recompute is 'some': give 'none', 'all', or the numbers of stages"),
        ([2], r"recompute names stage 2, and the plan has stages 0 to 1"),
        (["first"], "recompute is"),
        ([-1], "recompute names stage -1"),
    ],
)
def test_invalid_recompute_is_refused(recompute, said):
    case = CASES["batchnorm with a skip"]
    plan = even_plan(captured(case, F32, 8, 4), 2, 4)
    with pytest.raises(panpipe.RequestError, match=said):
        panpipe.pipeline(
            case.model(F32), case.step, case.batch(8, F32), plan=plan, memory=panpipe.Memory(recompute=recompute)
        )
