"""Profiling on streams: times are events, nothing waits between them, and timed operations run after their inputs."""

import pytest
import torch
from panpipe.backends import streams
from panpipe.core.capture.programs.programs import stage_programs
from panpipe.core.capture.programs.stage import boundaries, stage_graph
from panpipe.runtimes.devices.compute import Stopwatch
from panpipe.runtimes.profile.kernel_profile import least_s
from panpipe.runtimes.profile.operator_profile import profile_operators
from panpipe.runtimes.profile.stage_profile import profile_stages

from ...support.backends.recorded_streams import RecordedStreams
from ...support.cuts import batch_on, captured
from ...support.models import CASES

CPU = torch.device("cpu")
GPT = "tied gpt with dropout"


class Watched(RecordedStreams):
    """Recorded streams that note in which order moments were recorded and asked about."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def record(self, stream, *, timed=False):
        if timed:
            self.asked.append("moment")
        return super().record(stream, timed=timed)

    def elapsed_s(self, start, end):
        self.asked.append("wait")
        return super().elapsed_s(start, end)

    def synchronize(self, device):
        raise AssertionError("the stopwatch waits for the whole device")


@pytest.fixture
def recorded(monkeypatch):
    found = Watched()
    monkeypatch.setitem(streams._KINDS, "cpu", found)
    return found


def test_stopwatch_records_events_on_a_separate_stream_per_thread(recorded):
    watch = Stopwatch(CPU)
    with recorded.using(recorded.current(CPU)):
        x = torch.randn(4)
        with watch.active():
            start = watch.now()
            y = x + 1
            y = y * 2
            end = watch.now()
        y.add_(1)
    assert watch.between(start, end) == pytest.approx(2e-6)
    assert recorded.problems == []
    assert [name for name in recorded.operators if isinstance(name, tuple)] == [("profile", "MainThread")]


def test_stage_profile_does_not_wait_between_programs(recorded):
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


def test_operator_profile_does_not_wait_between_repeats(recorded):
    case = CASES[GPT]
    operators = captured(case, torch.float64, 8, 4)
    model, batch = case.model(torch.float64), batch_on(case, 2, torch.float64, "cpu")
    graph = profile_operators(
        operators, dict(model.named_parameters()), dict(model.named_buffers()), list(batch.values()), repeats=2
    )
    assert recorded.problems == []
    assert all(node.forward_s >= 0 for node in graph.nodes)
    assert sum(node.forward_s for node in graph.nodes) > 0
    first = recorded.asked.index("wait")
    assert first >= 2 * (1 + 2), "forward of three runs at least"


def test_kernel_profile_times_sequences_of_calls(recorded):
    x = torch.randn(4)
    calls = []
    seconds = least_s(lambda: calls.append(x + 1), CPU, repeats=2)
    assert seconds == pytest.approx(1e-6)
    waits = [i for i, what in enumerate(recorded.asked) if what == "wait"]
    assert recorded.asked[waits[0] + 1 : waits[1]] == ["moment"] * 4, "both runs are read after the last"
