"""``panpipe validate``: whether a plan, or a schedule file, completes and fits in memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..answers.options import argument, json_flag
from ..answers.output import bytes_text, note, print_json, print_records
from ..answers.plan_files import read_plan_or_schedule
from ..core.documents import as_plain
from ..core.errors import naming
from ..core.plan.plan import Plan
from ..core.plan.wording import plan_size
from ..core.wording import counted


def validate(
    path: Path = argument("A plan, or a schedule file of torch.distributed.pipelining.", ..., metavar="PLAN-OR-CSV"),
    json: bool = json_flag(),
) -> None:
    """Check placement, every action, message order, deadlocks and memory, before anything runs.

    Exit status 0: it completes and fits. 2: it does not complete; the message has the reason, for a deadlock its cycle.
    3: a device or a host runs out of memory.
    """
    from ..core.validation.validate import validate as check

    file = read_plan_or_schedule(path)
    plan = file.plan
    with naming(path):
        report = check(plan, lowered=file.lowered)
    for warning in report.warnings:
        note(f"warning: {warning}")
    actions = sum(len(order) for order in plan.device_actions)
    if json:
        print_json(_answer(plan, actions, as_plain(report)))
        return
    print(f"{path} is valid: {plan_size(plan)}, {counted(actions, 'compute action')}")
    if report.peak_memory_bytes and plan.prediction is not None:
        devices = plan.mesh.arrange(plan.prediction.cluster).devices[: plan.mesh.ranks]
        limits = plan.mesh.memory_bytes(plan.prediction.cluster)
        columns: dict[str, Callable[[int], object]] = {
            "device": lambda n: f"{n} {', '.join(device.name for device in devices[n :: plan.devices])}",
            "peak saved": lambda n: bytes_text(report.peak_saved_bytes[n]),
            "peak memory": lambda n: bytes_text(report.peak_memory_bytes[n]),
            "at": lambda n: report.peak_actions[n],
            "limit": lambda n: bytes_text(limits[n]),
        }
        if any(report.host_bytes):
            columns["on the host"] = lambda n: bytes_text(report.host_bytes[n])
        print_records("Memory", range(plan.devices), columns)


def _answer(plan: Plan, actions: int, report: dict[str, Any]) -> dict[str, Any]:
    return {
        "valid": True,
        "devices": plan.devices,
        "stages": len(plan.stages),
        "microbatches": plan.microbatches,
        "actions": actions,
        **report,
    }
