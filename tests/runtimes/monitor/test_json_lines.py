"""A JSON document for each step."""

import contextlib
import json
import os
import resource

from panpipe.runtimes.monitor.monitors import JsonLines
from panpipe.runtimes.monitor.records import DeviceReport, StepReport

DEVICE = DeviceReport(0, 0, 0, (0,), 0.5, 0.25, 100, 60, 2, 8)


def report(step, loss=1.5, **more):
    given = {
        "updated": True, "skipped": False, "time_s": 1.0, "metrics": {}, "rows": 4, "rows_per_s": 4.0, "tokens": None,
        "tokens_per_s": None, "grad_norm": None, "loss_scale": None, "learning_rates": (0.1,), "devices": (DEVICE,),
    } | more  # fmt: skip
    return StepReport(step=step, loss=loss, **given)


def test_file_is_created_with_its_folder_at_the_first_step(tmp_path):
    path = tmp_path / "logs" / "steps.jsonl"
    monitor = JsonLines(path)
    assert not path.parent.exists()
    monitor(report(1))
    line = json.loads(path.read_text())  # at once
    monitor.close()
    assert (line["step"], line["loss"], line["bubble"], line["message_bytes"]) == (1, 1.5, 0.25, 8)
    assert line["devices"][0]["stages"] == [0]


def test_later_steps_are_appended_also_after_close(tmp_path):
    monitor = JsonLines(tmp_path / "steps.jsonl")
    monitor(report(1))
    monitor.close()
    monitor.close()
    monitor(report(2))
    monitor.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "steps.jsonl").read_text().splitlines()] == [1, 2]


def test_number_that_json_lacks_is_its_name(tmp_path):
    monitor = JsonLines(tmp_path / "steps.jsonl")
    monitor(report(1, float("nan"), metrics={"a": float("inf"), "b": [-float("inf")]}))
    monitor.close()
    line = json.loads((tmp_path / "steps.jsonl").read_text())
    assert (line["loss"], line["metrics"]) == ("NaN", {"a": "Infinity", "b": ["-Infinity"]})
    assert float(line["loss"]) != float(line["loss"])


def test_sums_of_a_report_are_over_devices():
    other = DeviceReport(1, 0, 1, (1,), 0.5, 0.75, 300, 60, 3, 16)
    found = report(1, devices=(DEVICE, other))
    assert (found.bubble, found.messages, found.message_bytes, found.memory_peak_bytes) == (0.5, 5, 24, 300)


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
