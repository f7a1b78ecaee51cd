"""A JSON document for each step."""

import contextlib
import json
import os
import resource

from panpipe.runtimes.monitor.monitors import DeviceReport, JsonLines, StepReport

DEVICE = DeviceReport(0, 0, 0, (0,), 0.5, 0.25, 100, 60, 2, 8)


def report(step, loss=1.5, **more):
    given = {
        "updated": True, "skipped": False, "time_s": 1.0, "metrics": {}, "rows": 4, "rows_per_s": 4.0, "tokens": None,
        "tokens_per_s": None, "grad_norm": None, "loss_scale": None, "learning_rates": (0.1,), "devices": (DEVICE,),
    } | more  # fmt: skip
    return StepReport(step=step, loss=loss, **given)


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
