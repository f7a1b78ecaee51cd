"""The results of ``panpipe doctor``, as text and as plain data."""

from typing import Any

from ..runtimes.diagnose.doctor import TOLERANCES, Check, Findings
from .output import print_table


def plain_findings(found: Findings) -> dict[str, Any]:
    """The data that ``panpipe doctor --json`` prints."""
    return {
        "model": found.model,
        "dtype": str(found.dtype).removeprefix("torch."),
        "operators": found.operators,
        "capture_s": found.capture_s,
        "python": [{"where": where, "line": line} for where, line in found.regions.items()],
        "uncut": [{"operator": p.operator, "share": p.share, "line": p.line} for p in found.uncut],
        "checks": [
            {
                "devices": check.devices,
                "schedule": check.schedule,
                "stages": check.stages,
                "right": found.right(check),
                "problem": check.problem,
                **(
                    {
                        kind: getattr(check.distance, kind)
                        for kind in ("loss", "gradient", "parameter", "buffer", "undefined")
                    }
                    if check.distance is not None
                    else {}
                ),
            }
            for check in found.checks
        ],
        "healthy": found.healthy,
        "remark": found.remark,
    }


def print_findings(found: Findings) -> None:
    """Print what cannot be cut, the distance of each plan's results to one process, and the verdict."""
    dtype = str(found.dtype).removeprefix("torch.")
    print(f"{found.model}: captured in {found.capture_s:.1f} s, {found.operators} operators to cut between")
    for where, line in found.regions.items():
        what = "the end of the step" if where == "the end of the step" else f"module '{where}'"
        cause = found.causes.get(where, "this line needs the value of a tensor")
        print(f"- {what} remains Python code, on one stage: {line}: {cause}.")
        print("  To make it possible to cut it, compute both branches and select with torch.where.")
    for piece in found.uncut:
        print(
            f"- {piece.operator} has {piece.share:.0%} of all operations and cannot be cut: {piece.line} writes a "
            "buffer or a tensor in place that the first and the last of them use. Move the write closer to its readers."
        )
    rows = [_row(found, check) for check in found.checks]
    columns = ("plan, devices", "loss", "gradients", "parameters", "buffers", "")
    print_table(f"Distance to one process after two steps in {dtype}", columns, rows)
    for check in found.checks:
        if check.problem:
            omitted = " (not tried)" if check.too_many_stages else ""
            print(f"{check.schedule} on {check.devices} devices{omitted}: {check.problem}")
        elif check.distance is not None and check.distance.undefined:
            print(
                f"{check.schedule} on {check.devices} devices: {check.distance.undefined} losses and elements of "
                "gradients are not finite in one process either, and cannot be compared: give a model and a batch with "
                "finite gradients."
            )
        elif check.distance is not None and not found.right(check):
            names = ", ".join(f"{kind}: {name}" for kind, name in check.distance.worst.items())
            print(f"{check.schedule} on {check.devices} devices differs most in {names}")
    tolerance, gradients = TOLERANCES[found.dtype]
    print(f"Differences up to {tolerance:g}, and {gradients:g} of a gradient's norm, count as rounding.")
    if found.healthy:
        remark = f" on the same microbatches, but {found.remark}" if found.remark else ""
        print(f"It trains as one process does{remark}.")
    else:
        print("It does not train as one process does.")


def _row(found: Findings, check: Check) -> tuple[str, ...]:
    name = f"{check.schedule} on {check.devices}"
    far = check.distance
    if far is None:
        return name, "–", "–", "–", "–", "not run"
    numbers = (f"{value:.1e}" if value else "0" for value in (far.loss, far.gradient, far.parameter, far.buffer))
    return name, *numbers, "equal" if found.right(check) else "DIFFERS"
