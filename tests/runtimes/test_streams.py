"""The executor and memcpy on streams: every read behind its write, every reuse behind the last use, over plans.

No GPU is needed: operators run on the CPU, and recorded streams tell what a device that runs behind its host would
have been free to do in another order.
"""

import pytest
import torch
from panpipe.backends import streams
from panpipe.runtimes.team import ThreadTeam

from ..support.cuts import batch_on
from ..support.models import CASES
from ..support.parity import PLANS, build
from ..support.recorded_streams import RecordedStreams

CPU = torch.device("cpu")


def train(recorded, monkeypatch, plan, *, case="tied gpt with dropout", rows=8, microbatches=4, devices=2, steps=2):
    """Train on recorded streams; the user's own work goes on between steps, on the default stream."""
    monkeypatch.setitem(streams._KINDS, "cpu", recorded)
    pipe = build(ThreadTeam(devices), case, torch.float64, rows, None, microbatches, **PLANS[plan])
    with recorded.using(recorded.current(CPU)):
        for _ in range(steps):
            batch = batch_on(CASES[case], rows, torch.float64, "cpu")
            for tensor in batch.values():
                tensor.add_(0)  # the user makes the batch on the device, just now
            pipe.step(batch)
            del batch
            for parameter in pipe.model.parameters():
                parameter.grad.mul_(1.0)
                parameter.detach().mul_(1.0)
    return pipe


@pytest.mark.parametrize("plan", ["1f1b", "interleaved", "split backward", "zb-v", "recompute", "gpipe", "gis-h"])
def test_everything_is_ordered_behind_what_it_needs(plan, monkeypatch):
    recorded = RecordedStreams()
    train(recorded, monkeypatch, plan)
    assert recorded.problems == []
    used = {name[0] for name in recorded.operators if isinstance(name, tuple)}
    assert used == {"compute", "load", "memcpy"}


@pytest.mark.parametrize(("case", "rows", "devices"), [("token-weighted", 7, 2), ("batchnorm with a skip", 8, 3)])
def test_metrics_weights_and_three_devices(case, rows, devices, monkeypatch):
    recorded = RecordedStreams()
    train(recorded, monkeypatch, "1f1b", case=case, rows=rows, devices=devices)
    assert recorded.problems == []


@pytest.mark.parametrize("deaf", ["compute", "load", "memcpy"])
def test_a_queue_that_does_not_wait_is_found(deaf, monkeypatch):
    recorded = RecordedStreams(deaf)
    train(recorded, monkeypatch, "1f1b")
    assert any(f"('{deaf}'," in problem.split(" on ", 1)[1] for problem in recorded.problems)


def test_a_trace_has_the_transfers_own_times(monkeypatch):
    recorded = RecordedStreams()
    monkeypatch.setitem(streams._KINDS, "cpu", recorded)
    pipe = build(ThreadTeam(2), "tied gpt with dropout", torch.float64, 8, None, 4)
    _, trace = pipe.trace_step(batch_on(CASES["tied gpt with dropout"], 8, torch.float64, "cpu"))
    moved = [event for event in trace.events if event.action.peer is not None]
    assert len(moved) == 4 * 4
    assert all(event.end_s - event.start_s == pytest.approx(1e-6, rel=0.02) for event in moved)
