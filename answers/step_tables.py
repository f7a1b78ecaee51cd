"""Tables of a simulated step: the idle time by cause, and each device's memory at its peak."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..core.timing.idle import CAUSES, SHARED_LINKS, IdleTime, idle_time
from .output import print_table, seconds_text, share_text, wide

if TYPE_CHECKING:
    from ..simulators.result import SimulationResult

LEAST = 5e-4
"""Share of the step below which a cause is not printed; ``--json`` has all."""


def idle_of(result: "SimulationResult", unlimited_s: float | None = None) -> IdleTime:
    """The idle time of a simulated step; ``unlimited_s`` as in ``idle_time``."""
    from ..simulators.run import simulate

    return idle_time(
        result.plan,
        result.costs,
        lambda plan, costs, sharing: simulate(plan, costs, result.cluster, sharing=sharing).step_s,
        unlimited_s=unlimited_s,
        waits=_waits(result),
        known=result.known_step,
    )


def _waits(result: "SimulationResult") -> dict[str, float]:
    """The delay of transfers on each full link."""
    return {f"{use.src} → {use.dst}": use.delay_s for use in result.links}


def idle_answer(idle: IdleTime) -> dict[str, Any]:
    """The data that ``--json`` prints; shares are of the step."""
    step_s = idle.step_s or 1.0
    return {
        "step_s": idle.step_s,
        "compute_s": idle.compute_s,
        "idle_s": idle.idle_s,
        "idle_share": idle.idle_s / step_s,
        "causes": [
            {"cause": cause, "seconds": seconds, "share": seconds / step_s} for cause, seconds in idle.causes.items()
        ],
        "contention_by_link": [
            {"link": link, "seconds": seconds, "share": seconds / step_s} for link, seconds in idle.by_link.items()
        ],
    }


def print_idle(idle: IdleTime) -> None:
    """Print the table of causes."""
    rows = []
    for cause, seconds in sorted(idle.causes.items(), key=lambda item: -item[1]):
        if seconds < LEAST * idle.step_s:
            continue
        rows.append((cause, share_text(seconds, idle.step_s), seconds_text(seconds), CAUSES[cause]))
        if cause == SHARED_LINKS:
            rows += [
                (f"  {link}", share_text(part, idle.step_s), seconds_text(part), "")
                for link, part in idle.by_link.items()
                if part >= LEAST * idle.step_s
            ]
    title = (
        f"Why not faster: devices idle {share_text(idle.idle_s, idle.step_s)} of the step, "
        f"{seconds_text(idle.idle_s)} on average"
    )
    print_table(title, ("cause", "share", "time", "what happens"), rows, texts=("what happens",))


STATE = ("parameters", "gradients", "optimizer")
OTHERS: dict[str, tuple[str, ...]] = {"saved": ("saved",), "messages": ("communication",), "workspace": ("workspace",)}
"""Kinds of memory in each column; a narrow terminal has one for all of `STATE`."""
UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))


def print_memory(result: "SimulationResult", limits: Sequence[float] | None) -> None:
    """Print each device's memory by kind at its own peak, including messages in flight, and its limit.

    Args:
        result: a simulated step.
        limits: bytes that each device may use; None for a schedule of equal stages, which has no bytes.
    """
    largest = max([*result.peak_memory_bytes, 1.0])
    scale, unit = next((scale, unit) for scale, unit in UNITS if largest >= scale)
    digits = 2 if scale > 1 else 0
    columns: dict[str, tuple[str, ...]] = {"state": STATE}
    if wide():
        columns = {kind: (kind,) for kind in STATE}
    columns |= OTHERS
    rows = [
        (
            str(device),
            *(f"{sum(held[kind] for kind in kinds) / scale:.{digits}f}" for kinds in columns.values()),
            f"{sum(held.values()) / scale:.{digits}f}",
            *((f"{limits[device] / scale:.{digits}f}",) if limits and wide() else ()),
            *((share_text(sum(held.values()), limits[device]),) if limits else ()),
            str(result.peak_actions[device] or "–"),
        )
        for device, held in enumerate(result.memory_at_peak[: result.plan.devices])
    ]
    if limits is None:
        unit = "saved tensors of a stage for one microbatch"
    title = f"Memory at each device's peak, in {unit}, messages included"
    # A narrow terminal has no column of the limit, to which "used" is relative.
    limit = () if not limits else ("limit", "used") if wide() else ("used",)
    print_table(title, ("device", *columns, "all", *limit, "peak at"), rows)
