"""``panpipe doctor``: whether a model trains as a pipeline, with the same results as one process."""

import functools
import warnings
from typing import TYPE_CHECKING, Any

from ..answers.bundled_models import check_model_name
from ..answers.options import argument, json_flag, option
from ..answers.output import note, print_json, print_table
from ..core.documents import as_plain

if TYPE_CHECKING:
    from ..runtimes.diagnose.doctor import Check, Findings


def doctor(
    model: str = argument(
        "A function that returns (model, step, example_batch), optionally with a dict of options as fourth item: "
        "{'batch_dims': ...}, as in panpipe.pipeline.", ..., metavar="MODULE:FACTORY",
    ),
    devices: list[int] | None = option("Devices to check on; may be repeated. 2 and 3 by default.", min=1),
    microbatches: int = option("Microbatches in one step.", 3, min=1),
    json: bool = json_flag(),
) -> int:  # fmt: skip
    """Train three steps with several plans, and compare all results with the eager model in one process.

    Devices are threads. Random numbers are the same in both, so dropout stays on; BatchNorm stays in training mode.
    Exit status 1 means that a result differs.
    """
    check_model_name(model, bundled=False)

    import torch  # imported here, so that a mistyped name is refused at once

    from ..answers.models import load_model
    from ..runtimes.diagnose.doctor import check_model
    from ..runtimes.launch.team import ThreadTeam

    torch.set_num_threads(1)
    made, step, batch, options = load_model(model)
    note(f"checking {type(made).__name__}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        teams = [functools.partial(ThreadTeam, count) for count in devices or (2, 3)]
        found = check_model(made, step, batch, teams, microbatches, **options)
    if json:
        print_json(_plain(found))
    else:
        _print(found)
    return 0 if found.healthy else 1


def _plain(found: "Findings") -> dict[str, Any]:
    """The data that ``panpipe doctor --json`` prints."""
    checks = [
        {**as_plain(check), **as_plain(check.distance or {}), "right": found.right(check)} for check in found.checks
    ]
    return {
        **as_plain(found),
        "dtype": str(found.dtype).removeprefix("torch."),
        "python": [{"where": where, "line": line} for where, line in found.regions.items()],
        "checks": checks,
        "healthy": found.healthy,
    }


def _print(found: "Findings") -> None:
    """Print what cannot be cut, the distance of each plan's results to one process, and the verdict."""
    from ..runtimes.diagnose.doctor import TOLERANCES

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
    print_table(f"Distance to one process in three steps, in {dtype}", columns, rows)
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


def _row(found: "Findings", check: "Check") -> tuple[str, ...]:
    name = f"{check.schedule} on {check.devices}"
    far = check.distance
    if far is None:
        return name, "–", "–", "–", "–", "not run"
    numbers = (f"{value:.1e}" if value else "0" for value in (far.loss, far.gradient, far.parameter, far.buffer))
    return name, *numbers, "equal" if found.right(check) else "DIFFERS"
