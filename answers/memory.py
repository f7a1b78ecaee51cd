"""A table of each device's memory at its peak, by kind."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .output import print_table, share_text, wide

if TYPE_CHECKING:
    from ..simulators.result import SimulationResult

HEADINGS = {
    "parameters": "params",
    "gradients": "grads",
    "optimizer": "optim",
    "saved": "saved",
    "communication": "comm",
    "workspace": "work",
}
UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))


def print_memory(result: "SimulationResult", limits: Sequence[float] | None) -> None:
    """Print each device's memory by kind at its own peak, including messages in flight, and its limit.

    Args:
        result: a simulated step.
        limits: bytes that each device may use; None if there is no limit.
    """
    largest = max([*result.peak_memory_bytes, 1.0])
    scale, unit = next((scale, unit) for scale, unit in UNITS if largest >= scale)
    digits = 2 if scale > 1 else 0
    rows = [
        (
            str(device),
            *(f"{held[kind] / scale:.{digits}f}" for kind in HEADINGS),
            f"{sum(held.values()) / scale:.{digits}f}",
            *((f"{limits[device] / scale:.{digits}f}",) if limits and wide() else ()),
            *((share_text(sum(held.values()), limits[device]),) if limits else ()),
            str(result.peak_actions[device] or "–"),
        )
        for device, held in enumerate(result.memory_at_peak[: result.plan.devices])
    ]
    title = f"Memory at each device's peak, in {unit}, messages included"
    # On a narrow terminal the column of the limit is omitted: "used" is relative to it.
    limit = () if not limits else ("limit", "used") if wide() else ("used",)
    print_table(title, ("device", *HEADINGS.values(), "all", *limit, "at"), rows)
