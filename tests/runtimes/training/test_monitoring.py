"""Measured steps for the user's monitors: options, the report, and which process calls them."""

from types import SimpleNamespace

import pytest
import torch
from panpipe.core.actions import parse_action
from panpipe.runtimes.engine.step_data import StepOptions, StepRecord
from panpipe.runtimes.monitor.measure import Numbers
from panpipe.runtimes.optimizer.stage_state import StageState
from panpipe.runtimes.training import monitoring as module
from panpipe.runtimes.training.monitoring import Monitoring, UpdateNumbers
from torch import nn

from ...support.plans import orders, plan_of

PLAN = plan_of(orders("0F0 0B0", "1F0 1B0"), (0, 1))


def numbers(busy_s, step_s=4.0, call_s=5.0, rows=3.0, tokens=30.0):
    return Numbers(busy_s, step_s, call_s, 100.4, 40.6, 2.0, 16.0, rows, tokens)


TABLE = [numbers(1.0), numbers(3.0, call_s=6.0), numbers(4.0, rows=5.0), numbers(2.0, step_s=8.0)]
"""Two replicas of two devices."""


class Recorded:
    def __init__(self):
        self.reports, self.closed = [], 0

    def __call__(self, report):
        self.reports.append(report)

    def close(self):
        self.closed += 1


def stages_of(first=True, batches=2):
    state = StageState(
        {"w": nn.Parameter(torch.ones(2))}, {}, lambda given: torch.optim.SGD([{"params": list(given), "lr": 0.25}])
    )
    team = SimpleNamespace(first=first, size=2, batches=batches, rank=lambda number: number + 10)
    return SimpleNamespace(team=team, plan=PLAN, states={0: state, 1: state})


def done(loss=2.5):
    return SimpleNamespace(loss=torch.tensor(loss), metrics=lambda: {"top": 1.0}, records={}, trace=None)


def report_of(monkeypatch, table=TABLE, due=True, skipped=False, norm=7.0, first=True, batches=2):
    monkeypatch.setattr(module, "gather_numbers", lambda team, queues, own: table)
    monitor = Recorded()
    monitoring = Monitoring([monitor], stages_of(first, batches), {})
    update = UpdateNumbers(9, due, skipped, None if norm is None else torch.tensor(norm), 64.0)
    monitoring.report(done(), [], 1.0, update)
    monitoring.close()
    return monitor


def test_steps_are_recorded_only_for_monitors():
    options = StepOptions()
    assert Monitoring([], stages_of(), {}).options(options) is options
    measured = Monitoring([print], stages_of(), {}).options(options)
    assert (measured.trace, measured.watch, measured.peaks) == (True, True, False)


def test_report_of_all_replicas(monkeypatch):
    (found,) = report_of(monkeypatch).reports
    assert (found.step, found.loss, found.metrics, found.loss_scale) == (9, 2.5, {"top": 1.0}, 64.0)
    assert found.time_s == 6  # of the slowest
    assert (found.rows, found.tokens) == (8, 60)  # of the first device of each replica
    assert found.rows_per_s == pytest.approx(8 / 6)
    assert found.tokens_per_s == pytest.approx(10)


def test_batch_that_tensor_ranks_share_counts_once(monkeypatch):
    (found,) = report_of(monkeypatch, batches=1).reports
    assert (found.rows, found.tokens) == (3, 30)
    assert len(found.devices) == 4


def test_report_has_the_numbers_of_each_device(monkeypatch):
    (found,) = report_of(monkeypatch).reports
    assert [(d.rank, d.replica, d.device, d.stages) for d in found.devices] == [
        (10, 0, 0, (0,)), (11, 0, 1, (1,)), (12, 1, 0, (0,)), (13, 1, 1, (1,))
    ]  # fmt: skip
    assert [d.bubble for d in found.devices] == pytest.approx([7 / 8, 5 / 8, 4 / 8, 6 / 8])  # of the longest step
    first = found.devices[0]
    assert (first.memory_peak_bytes, first.saved_peak_bytes, first.messages, first.message_bytes) == (100, 41, 2, 16)


@pytest.mark.parametrize(
    ("due", "skipped", "wanted"),
    [(True, False, (True, False, 7)), (True, True, (False, True, 7)), (False, False, (False, False, None))],
)
def test_report_names_updates_that_were_skipped(monkeypatch, due, skipped, wanted):
    (found,) = report_of(monkeypatch, due=due, skipped=skipped).reports
    assert (found.updated, found.skipped, found.grad_norm) == wanted


def test_unknown_numbers_are_none(monkeypatch):
    table = [numbers(1.0, tokens=float("nan")), *TABLE[1:]]
    (found,) = report_of(monkeypatch, table=table, norm=None).reports
    assert (found.tokens, found.tokens_per_s, found.grad_norm) == (None, None, None)
    assert found.learning_rates == (0.25,)


def test_process_that_is_not_the_first_calls_none(monkeypatch):
    other = report_of(monkeypatch, first=False)
    assert (other.reports, other.closed) == ([], 0)
    assert report_of(monkeypatch).closed == 1


def test_numbers_of_own_devices_come_from_their_records(monkeypatch):
    given = []
    monkeypatch.setattr(module, "gather_numbers", lambda team, queues, own: given.append(own) or TABLE)
    record = StepRecord({}, 0, 4_000_000_000, [(parse_action("0F0"), "compute", 0, 10**9, 0)], peak_saved=5, shared=2)
    monitoring = Monitoring([Recorded()], stages_of(), {})
    run = SimpleNamespace(**{**vars(done()), "records": {0: record}})
    monitoring.report(run, [], 1.5, UpdateNumbers(1, True, False, None, None))
    found = given[0][0]
    assert (found.busy_s, found.step_s, found.call_s, found.saved_peak) == (1.0, 4.0, 1.5, 5)
    assert found.memory_peak >= 8 + 7  # the parameter, saved and shared tensors


def test_other_stages_are_followed(monkeypatch):
    monitoring, other = Monitoring([Recorded()], stages_of(), {}), stages_of(first=False)
    monitoring.follow(other, {0: "queue"})
    given = []
    monkeypatch.setattr(module, "gather_numbers", lambda team, queues, own: given.append((team, queues)) or TABLE)
    monitoring.report(done(), [], 1.0, UpdateNumbers(1, True, False, None, None))
    assert given == [(other.team, {0: "queue"})]
