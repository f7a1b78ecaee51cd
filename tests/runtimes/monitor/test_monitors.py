"""Monitors: the numbers of each step, the rank that is called, failures, and the ready monitors."""

import json
import math

import panpipe
import pytest
import torch
from panpipe.core.actions import SEND_KINDS
from panpipe.core.trace.compare import bubble_per_device
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.monitor.monitors import monitors_of
from panpipe.runtimes.update.training import Training

from ...support.models import CASES
from ...support.programs.poison import POISONED, poisoned_batch
from ...support.programs.scaling import TAPPED, Scaler, tapped_batch
from ...support.ranks.teams import pipeline_on
from ...support.training import SGD, parameters, unequal

GPT = CASES["tied gpt with dropout"]


def monitored(case, *monitors, optimizer=SGD, **training):
    """A pipeline of two threads, and the list of its reports."""
    reports = []
    pipe = pipeline_on(
        ThreadTeam(2), case, 8, 4, optimizer, training=Training(**training), monitors=[*monitors, reports.append]
    )
    return pipe, reports


def batch_with(layer=None):
    return poisoned_batch(8, torch.float32, layer)


def test_report_has_the_numbers_of_the_step():
    pipe, reports = monitored(POISONED, clip_norm=0.5, optimizer=torch.optim.AdamW)
    losses = [pipe.step(batch_with()).item(), pipe.step(batch_with(), update=False).item()]
    first, kept = reports
    assert [r.loss for r in reports] == losses
    assert [r.step for r in reports] == [1, 2]
    assert first.metrics == {"doubled": pytest.approx(2 * losses[0])}
    assert (first.updated, first.skipped, kept.updated, kept.skipped) == (True, False, False, False)
    assert first.grad_norm == pipe.metrics.grad_norm
    assert (kept.grad_norm, first.loss_scale, first.tokens, first.tokens_per_s) == (None, None, None, None)
    assert first.rows == 8
    assert first.rows_per_s == pytest.approx(8 / first.time_s)
    assert first.learning_rates == (1e-3,)
    assert [(d.rank, d.replica, d.device) for d in first.devices] == [(0, 0, 0), (1, 0, 1)]
    assert [d.stages for d in first.devices] == [(0,), (1,)]
    for device in first.devices:
        assert 0 < device.busy_s < first.time_s
        assert 0 <= device.bubble < 1
        assert device.messages == 4  # one for each microbatch: activations from the first, gradients from the second
        assert device.message_bytes > 0
    assert first.message_bytes == sum(d.message_bytes for d in first.devices)


def test_report_has_memory_peaks_of_each_device():
    pipe, reports = monitored(POISONED, optimizer=torch.optim.AdamW)
    for _ in range(2):
        pipe.step(batch_with())
    for device, report in enumerate(reports[-1].devices):
        state = pipe._trainer.stages.states[device]
        held = [*state.parameters.values(), *state.buffers.values(), *state.gradient_buffers]
        held += [value for kept in state.optimizer.state.values() for value in kept.values()]
        bytes_held = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}.values())
        assert report.memory_peak_bytes == bytes_held + report.saved_peak_bytes
        assert report.saved_peak_bytes > 0
    _, trace = pipe.trace_step(batch_with())
    assert reports[-1].memory_peak_bytes == max(each.memory_peak_bytes for each in reports[-1].devices)
    sent = [event.bytes for event in trace.events if event.action.kind in SEND_KINDS]
    assert (reports[-1].messages, reports[-1].message_bytes) == (len(sent), sum(sent))


@pytest.mark.slow
def test_numbers_of_simulated_devices_are_those_of_the_simulator():
    reports = []
    model = POISONED.model(torch.float32)
    pipe = panpipe.pipeline(
        model, POISONED.step, batch_with(), optimizer=SGD, microbatches=4, backend="simulator",
        devices="2xRTX3090", plan="1f1b",
        run=panpipe.Run(monitor=reports.append, progress=False),
    )  # fmt: skip
    _, trace = pipe.trace_step(batch_with())
    (report,) = reports
    assert report.time_s == trace.step_s
    assert [d.bubble for d in report.devices] == pytest.approx(list(bubble_per_device(trace)))
    assert report.messages == 8


def test_report_has_loss_scale_and_skipped_updates():
    pipe, reports = monitored(TAPPED, scaler=Scaler(init_scale=2.0**10))
    pipe.step(tapped_batch(8, torch.float32, 1))
    pipe.step(tapped_batch(8, torch.float32))
    assert [(r.loss_scale, r.skipped, r.updated) for r in reports] == [(1024.0, True, False), (512.0, False, True)]


def test_monitored_steps_have_the_bits_of_others():
    pipe, _ = monitored(GPT)
    plain = pipeline_on(ThreadTeam(2), GPT, 8, 4, SGD)
    for _ in range(2):
        assert torch.equal(pipe.step(GPT.batch(8, torch.float32)), plain.step(GPT.batch(8, torch.float32)))
    assert unequal(parameters(pipe._session.model), parameters(plain._session.model)) == []


def test_monitor_that_raises_is_named_and_changes_nothing(caplog):
    def broken(report):
        raise OSError(f"disk full at {report.step // 3}")

    pipe, reports = monitored(POISONED, broken)
    plain = pipeline_on(ThreadTeam(2), POISONED, 8, 4, SGD)
    for _ in range(3):
        pipe.step(batch_with())
        plain.step(batch_with())
    assert len(reports) == 3  # those after it are called
    assert unequal(parameters(pipe._session.model), parameters(plain._session.model)) == []
    said = [r for r in caplog.records if r.name == "panpipe"]
    assert [r.step for r in said] == [1, 3]  # once for each message
    assert "broken failed in step 1: OSError: disk full at 0; training goes on" in said[0].message


def test_step_that_raises_is_reported_first():
    pipe, reports = monitored(POISONED, on_nonfinite="raise")
    with pytest.raises(panpipe.NonFiniteError):
        pipe.step(batch_with(2))
    assert math.isnan(reports[0].loss)
    assert reports[0].skipped


def test_json_lines_have_strict_json(tmp_path):
    path = tmp_path / "logs" / "steps.jsonl"
    monitor = panpipe.monitors.JsonLines(path)
    assert not path.exists()  # a rank that is not called writes nothing
    pipe, reports = monitored(POISONED, monitor, on_nonfinite="skip")
    pipe.step(batch_with())
    pipe.step(batch_with(1))
    lines = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["loss"] == reports[0].loss
    assert lines[0]["devices"][1]["stages"] == [1]
    assert lines[0]["message_bytes"] == reports[0].message_bytes
    assert math.isnan(float(lines[1]["loss"]))
    pipe.close()
    assert monitor._file is None


@pytest.mark.parametrize("given", [3, "log.jsonl", [print, None]])
def test_monitor_that_is_no_function_is_refused(given):
    with pytest.raises(panpipe.RequestError, match=r"monitor is .*: give a function of a panpipe.monitors.StepReport"):
        monitors_of(given)
