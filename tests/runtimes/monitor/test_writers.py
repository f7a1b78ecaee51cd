"""Monitors that write: scalars of a step for TensorBoard, and a JSON document for each step."""

import builtins
import contextlib
import json
import os
import resource

import panpipe
import pytest
from panpipe.core.errors import RequestError
from panpipe.runtimes.monitor.monitors import DeviceReport, JsonLines, StepReport, TensorBoard, scalars


def report(step=3, **changes):
    devices = tuple(
        DeviceReport(
            rank=rank, replica=0, device=rank, stages=(rank,), busy_s=1.0, bubble=0.25 + rank / 2, memory_peak_bytes=10,
            saved_peak_bytes=5, messages=4, message_bytes=100,
        )
        for rank in range(2)
    )  # fmt: skip
    given = {
        "updated": True, "skipped": False, "time_s": 2.0, "loss": 0.5, "metrics": {"accuracy": 0.75}, "rows": 8,
        "rows_per_s": 4.0, "tokens": None, "tokens_per_s": None, "grad_norm": None, "loss_scale": 1024.0,
        "learning_rates": (0.1, 0.2), "devices": devices,
    }  # fmt: skip
    return StepReport(step=step, **{**given, **changes})


def test_scalars_have_a_tag_for_each_known_number():
    assert scalars(report()) == {
        "loss": 0.5, "metrics/accuracy": 0.75, "learning_rate/group 0": 0.1, "learning_rate/group 1": 0.2,
        "update/loss_scale": 1024.0, "update/skipped": 0.0, "step/time_s": 2.0, "step/bubble": 0.5,
        "step/rows_per_s": 4.0, "step/messages": 8, "step/message_bytes": 200, "memory_peak_bytes/rank 0": 10,
        "bubble/rank 0": 0.25, "memory_peak_bytes/rank 1": 10, "bubble/rank 1": 0.75,
    }  # fmt: skip
    known = scalars(report(grad_norm=2.0, tokens_per_s=7.0, skipped=True))
    assert (known["update/grad_norm"], known["step/tokens_per_s"], known["update/skipped"]) == (2.0, 7.0, 1.0)


def test_files_are_written_from_the_first_step_on_and_after_a_close_anew(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monitor = panpipe.monitors.TensorBoard(tmp_path)
    assert not list(tmp_path.iterdir())
    monitor.close()  # nothing to close
    monitor(report(1))
    monitor(report(2, loss=0.25))
    monitor.close()
    monitor.close()
    read = EventAccumulator(str(tmp_path)).Reload()
    for number, given in enumerate((report(1), report(2, loss=0.25))):
        for tag, value in scalars(given).items():
            assert read.Scalars(tag)[number].step == given.step
            assert read.Scalars(tag)[number].value == pytest.approx(value, rel=1e-6)


def test_missing_package_is_refused_with_its_name(monkeypatch):
    real = builtins.__import__

    def missing(name, *arguments, **options):
        if name.startswith("torch.utils.tensorboard"):
            raise ImportError("No module named 'tensorboard'")
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(RequestError, match=r"need the package tensorboard .*: pip install 'panpipe\[tensorboard\]'"):
        TensorBoard()


def test_later_steps_are_appended_also_after_close(tmp_path):
    monitor = JsonLines(tmp_path / "steps.jsonl")
    monitor(report(1))
    monitor.close()
    monitor.close()
    monitor(report(2))
    monitor.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "steps.jsonl").read_text().splitlines()] == [1, 2]


def test_line_after_a_full_disk_is_whole(tmp_path):
    """In a process of its own, whose files are limited for a while."""
    path = tmp_path / "steps.jsonl"
    child = os.fork()
    if not child:
        try:
            monitor = JsonLines(path)
            monitor(report(1))
            most = path.stat().st_size + 100
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
            for step in (2, 3):
                with contextlib.suppress(OSError):
                    monitor(report(step))
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            monitor(report(4))
            monitor(report(5))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    lines = path.read_text().splitlines()
    assert [json.loads(line)["step"] for line in (lines[0], *lines[-2:])] == [1, 4, 5]
    assert len(lines) == 4  # with the part of a line, which ends
