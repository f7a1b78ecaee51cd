"""The idle time of a step by cause, as text and as plain data."""

from typing import TYPE_CHECKING, Any

from ..core.timing.idle import CAUSES, SHARED_LINKS, IdleTime, idle_time
from .output import print_table, seconds_text, share_text

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
        lambda plan, costs, sharing: simulate(plan, costs, result.cluster, sharing=sharing, memory=False).step_s,
        unlimited_s=unlimited_s,
        waits=_waits(result),
        known=result.known_step,
    )


def _waits(result: "SimulationResult") -> dict[str, float]:
    """Idle time of devices because of each full link; if there is none, the delay of transfers on each link."""
    waits: dict[str, float] = {}
    for contention in result.contention:
        for (src, dst), seconds in contention.items():
            waits[f"{src} → {dst}"] = waits.get(f"{src} → {dst}", 0.0) + seconds
    return waits or {f"{use.src} → {use.dst}": use.delay_s for use in result.links}


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
