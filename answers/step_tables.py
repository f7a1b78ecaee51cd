"""Tables of a simulated step: the idle time by cause, and each device's memory at its peak."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from ..core.garbage import collector_paused
from ..core.plan.plan import Plan
from ..core.timing.idle import CAUSES, SHARED_LINKS, IdleTime, idle_time
from .output import print_records, print_table, seconds_text, share_text, wide

if TYPE_CHECKING:
    from ..simulators.result import SimulationResult

LEAST = 5e-4
"""Share of the step below which a cause is not printed; ``--json`` has all."""


def idle_of(result: "SimulationResult", unlimited_s: float | None = None) -> IdleTime:
    """The idle time of a simulated step; ``unlimited_s`` as in ``idle_time``."""
    from ..simulators.run import alone_s

    plan = result.plan

    def alone(each: Plan, update: bool) -> float:
        known = result.without_update_s if each is plan and not update else None
        queues = result.queues if each is plan else None
        return alone_s(each, result.costs, result.cluster, update, queues) if known is None else known

    delays = {f"{use.src} → {use.dst}": use.delay_s for use in result.links}
    with collector_paused():
        return idle_time(plan, result.costs, result.step_s, alone, unlimited_s=unlimited_s, waits=delays)


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


def print_devices(
    result: "SimulationResult", limits: Sequence[float], more: Mapping[str, Callable[[int], object]] | None = None
) -> None:
    """Print each device's memory by kind at its own peak, including messages in flight, and its limit.

    Args:
        result: a simulated step.
        limits: bytes that each device may use.
        more: further columns, by heading: a device's number → its cell.
    """
    largest = max([*result.peak_memory_bytes, 1.0])
    scale, unit = next((scale, unit) for scale, unit in UNITS if largest >= scale)
    digits = 2 if scale > 1 else 0
    held = result.memory_at_peak

    def size(kinds: Collection[str]) -> Callable[[int], object]:
        return lambda device: f"{sum(held[device][kind] for kind in kinds) / scale:.{digits}f}"

    columns: dict[str, Callable[[int], object]] = {"device": str, **(more or {})}
    columns |= {kind: size((kind,)) for kind in STATE} if wide() else {"state": size(STATE)}
    columns |= {name: size(kinds) for name, kinds in OTHERS.items()}
    columns["all"] = lambda device: f"{sum(held[device].values()) / scale:.{digits}f}"
    if wide():  # a narrow terminal has no column of the limit, to which "used" is relative
        columns["limit"] = lambda device: f"{limits[device] / scale:.{digits}f}"
    columns["used"] = lambda device: share_text(sum(held[device].values()), limits[device])
    columns["peak at"] = lambda device: result.peak_actions[device] or "–"
    title = f"Memory at each device's peak, in {unit}, messages included"
    print_records(f"Devices. {title}" if more else title, range(result.plan.devices), columns)
