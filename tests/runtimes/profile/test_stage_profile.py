"""Times of stage programs on streams: events between which nothing waits."""

import math

import pytest
import torch
from panpipe.backends import streams
from panpipe.core.capture.programs.programs import stage_programs
from panpipe.core.capture.programs.stage import boundaries, stage_graph
from panpipe.runtimes.profile import stage_profile
from panpipe.runtimes.profile.stage_profile import profile_stages

from ...support.backends.watched_streams import WatchedStreams
from ...support.cuts import batch_on, captured
from ...support.models import CASES

GPT = "tied gpt with dropout"


@pytest.fixture
def recorded(monkeypatch):
    found = WatchedStreams()
    monkeypatch.setitem(streams._KINDS, "cpu", found)
    return found


def test_stage_profile_does_not_wait_between_programs(recorded, monkeypatch):
    monkeypatch.setattr(stage_profile, "LONG_S", math.inf)  # however slow the machine is, no run is left out
    case = CASES[GPT]
    operators = captured(case, torch.float64, 8, 4)
    names = [node.name for node in operators.graph.nodes]
    stages = [names[: len(names) // 2], names[len(names) // 2 :]]
    programs = {1: stage_programs(stage_graph(operators, stages, 1))}
    model, batch = case.model(torch.float64), batch_on(case, 2, torch.float64, "cpu")
    layout = boundaries(operators, stages)
    costs = profile_stages(
        programs, layout, operators, dict(model.named_parameters()), dict(model.named_buffers()),
        list(batch.values()), torch.optim.SGD, repeats=3,
    )[1]  # fmt: skip
    first = recorded.asked.index("wait")
    assert recorded.asked[:first] == ["moment"] * (2 * 4 * 4), "F, B, I and W, four times, before the first wait"
    assert recorded.problems == []
    times = costs.forward_s, costs.full_backward_s, costs.backward_input_s, costs.backward_weight_s, costs.optimizer_s
    assert min(times) >= 1e-6
