"""``panpipe doctor``: whether a model trains as a pipeline, and ends where one process does."""

import functools
import warnings
from typing import Annotated, Any

import torch
import typer

from ..runtimes.doctor import TOLERANCES, Check, Findings, check_up
from ..runtimes.team import ThreadTeam
from .models import load_model
from .output import note, print_json, print_table


def doctor(
    model: Annotated[
        str, typer.Argument(metavar="MODULE:FACTORY", help="A function that returns (model, step, example_batch).")
    ],
    devices: Annotated[
        list[int] | None, typer.Option(help="Devices to check on; may be repeated. 2 and 3 by default.", min=1)
    ] = None,
    microbatches: Annotated[int, typer.Option(help="Microbatches in one step.", min=1)] = 3,
    json: Annotated[bool, typer.Option("--json", help="Print JSON alone.")] = False,
) -> int:
    """Train two steps by several plans, and compare everything with the untouched model in one process.

    Devices are threads. Random numbers are the same in both, so dropout stays on; BatchNorm stays in training mode.
    Exit status 1 says that something differs.
    """
    torch.set_num_threads(1)
    made, step, batch = load_model(model)
    note(f"checking {type(made).__name__}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        teams = [functools.partial(ThreadTeam, count) for count in devices or (2, 3)]
        found = check_up(made, step, batch, teams, microbatches)
    if json:
        print_json(_answer(found))
    else:
        _print(found)
    return 0 if found.healthy else 1


def _answer(found: Findings) -> dict[str, Any]:
    return {
        "model": found.model,
        "dtype": str(found.dtype).removeprefix("torch."),
        "operators": found.operators,
        "capture_s": found.capture_s,
        "python": [{"where": where, "line": line} for where, line in found.regions.items()],
        "uncut": [{"operator": p.operator, "share": p.share, "line": p.line} for p in found.pieces],
        "checks": [
            {
                "devices": check.devices,
                "schedule": check.schedule,
                "stages": check.stages,
                "right": found.right(check),
                "problem": check.problem,
                **(
                    {kind: getattr(check.distance, kind) for kind in ("loss", "gradient", "parameter", "buffer")}
                    if check.distance is not None
                    else {}
                ),
            }
            for check in found.checks
        ],
        "healthy": found.healthy,
    }


def _print(found: Findings) -> None:
    dtype = str(found.dtype).removeprefix("torch.")
    print(f"{found.model}: captured in {found.capture_s:.1f} s, {found.operators} operators to cut between")
    for where, line in found.regions.items():
        what = "the end of the step" if where == "the end of the step" else f"module '{where}'"
        print(f"- {what} stays Python, on one stage: {line} needs a tensor's value.")
        print("  To have it cut as well, compute both ways and choose with torch.where.")
    for piece in found.pieces:
        print(
            f"- {piece.operator} holds {piece.share:.0%} of all operations and cannot be cut: {piece.line} writes a "
            "buffer or a tensor in place that the first and the last of them use. Write it nearer to what reads it."
        )
    rows = [_row(found, check) for check in found.checks]
    columns = ("plan, devices", "loss", "gradients", "parameters", "buffers", "")
    print_table(f"Distance to one process after two steps in {dtype}", columns, rows)
    for check in found.checks:
        if check.problem:
            print(f"{check.schedule} on {check.devices} devices: {check.problem}")
        elif check.distance is not None and not found.right(check):
            names = ", ".join(f"{kind}: {name}" for kind, name in check.distance.worst.items())
            print(f"{check.schedule} on {check.devices} devices differs most in {names}")
    tolerance, gradients = TOLERANCES[found.dtype]
    print(f"Rounding is up to {tolerance:g}, and {gradients:g} of a gradient's norm.")
    print("It trains as one process does." if found.healthy else "It does not train as one process does.")


def _row(found: Findings, check: Check) -> tuple[str, ...]:
    name = f"{check.schedule} on {check.devices}"
    far = check.distance
    if far is None:
        return name, "–", "–", "–", "–", "not run"
    numbers = (f"{value:.1e}" if value else "0" for value in (far.loss, far.gradient, far.parameter, far.buffer))
    return name, *numbers, "equal" if found.right(check) else "DIFFERS"
