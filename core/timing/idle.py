"""Why a step is not faster: the time in which devices do not compute, by cause.

A step without idle time would take the mean load of the devices: Σ (F, I, W) ÷ devices. The rest of the step is the
mean idle time of a device. Its causes are removed one after another, and the same plan is run again after each. The
share of a cause is the time by which its removal shortens the step, so the shares sum to the idle time exactly::

    the step as it is
     │ shared links    every transfer has the full bandwidth of its path
     │ update          optimizer steps, sums of tied weights and over replicas, and SYNC take no time
     │ host copies     nothing is offloaded
     │ messages        messages take no time
     │ recomputation   nothing is recomputed
     │ memory limit, fill and drain, steady state: what the order of the schedule leaves
    the load of the busiest device, a lower bound of the step for every order of these stages
     │ imbalance
    the mean load

The idle time that the order leaves is waiting for other stages: before a device's first backward and after its last
forward it is fill and drain, in between steady state. The part due to the memory limit is known only if a schedule is
known that is faster on the same stages and does not fit.

These are seconds that the whole step would gain, found by runs of the engine, which agrees with the simulator where no
link is shared. What each device waited for in one run is another question, which ``simulators/bubbles.py`` answers with
other causes: a device may wait seconds for a message (cause ``communication`` there) whose removal would not shorten
the step, because the next wait becomes longer.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import evolve, frozen

from ..actions import COMPUTE_KINDS, Kind
from ..costs.costs import StageCosts
from ..plan.plan import Plan
from .orders import Evaluation, evaluate

FILL_AND_DRAIN = "fill and drain"
STEADY_STATE = "steady state"
IMBALANCE = "imbalance"
MESSAGES = "messages"
HOST_COPIES = "host copies"
SHARED_LINKS = "shared links"
RECOMPUTATION = "recomputation"
MEMORY = "memory limit"
UPDATE = "update"
CAUSES = {
    FILL_AND_DRAIN: "the pipeline fills and drains",
    STEADY_STATE: "in the steady state a device waits for another's result",
    IMBALANCE: "the busiest device's load is above the mean",
    MESSAGES: "messages take time on links of their own",
    HOST_COPIES: "saved tensors are copied to the host and back",
    SHARED_LINKS: "messages, and copies to and from hosts, share links",
    RECOMPUTATION: "forwards are run again to save memory",
    MEMORY: "a faster order of the same stages does not fit",
    UPDATE: "optimizer steps, sums of gradients, gathers of parameters",
}

StepTime = Callable[[Plan, bool], float]
"""Seconds of a step of a plan in which every transfer has the full bandwidth of its path, and whether optimizer steps
and all tasks but host copies take time."""

NOISE = 1e-9
"""Share of a step below which a difference of two steps is rounding."""


@frozen
class IdleTime:
    """The idle time of one step. Seconds are means over the devices.

    Args:
        step_s: the step.
        compute_s: F, I and W of a device.
        causes: idle seconds by cause, all of ``CAUSES`` in order; they add up to ``step_s − compute_s``.
        by_link: seconds of ``shared links`` by link, largest first; empty where none is shared.
    """

    step_s: float
    compute_s: float
    causes: dict[str, float]
    by_link: dict[str, float]

    @property
    def idle_s(self) -> float:
        """Idle seconds, mean over the devices."""
        return self.step_s - self.compute_s


def idle_data(idle: IdleTime) -> dict[str, Any]:
    """The idle time by cause, as plain data for pages and ``--json``; shares are of the step."""
    step_s = idle.step_s or 1.0
    return {
        "step_s": idle.step_s,
        "compute_s": idle.compute_s,
        "idle_s": idle.idle_s,
        "idle_share": idle.idle_s / step_s,
        "causes": [
            {"cause": cause, "what": CAUSES[cause], "seconds": seconds, "share": seconds / step_s}
            for cause, seconds in idle.causes.items()
        ],
        "contention_by_link": [
            {"link": link, "seconds": seconds, "share": seconds / step_s} for link, seconds in idle.by_link.items()
        ],
    }


def idle_time(
    plan: Plan,
    costs: Sequence[StageCosts],
    step_s: float,
    alone: StepTime,
    *,
    unlimited_s: float | None = None,
    waits: Mapping[str, float] | None = None,
) -> IdleTime:
    """The idle time of a plan by cause.

    Args:
        plan, costs: of the step.
        step_s: the step as it is, with shared links.
        alone: runs the plan itself, or without its host copies, on the same devices with the same costs.
        unlimited_s: the step of the fastest known order of the same stages without memory limits.
        waits: by link, how much longer transfers took because they shared it, in any unit; divides ``shared links``,
            which are no cause without any.
    """
    left, run = step_s, plan
    causes = dict.fromkeys(CAUSES, 0.0)

    def without(cause: str, shorter_s: float) -> None:
        nonlocal left
        if left - shorter_s > NOISE * step_s:
            causes[cause], left = left - shorter_s, shorter_s

    if any((waits or {}).values()):
        without(SHARED_LINKS, alone(run, True))
    without(UPDATE, alone(run, False))
    if run.memory.offload:
        run = evolve(run, memory=evolve(run.memory, offload=()))
        without(HOST_COPIES, alone(run, False))

    def at_once(run: Plan) -> Evaluation:
        return evaluate(run.device_actions, run.placement, costs, edges=run.edges, recompute=run.memory.recompute)

    final = at_once(run)
    without(MESSAGES, final.makespan)
    if run.memory.recompute:
        run = evolve(run, memory=evolve(run.memory, recompute=()))
        final = at_once(run)
        without(RECOMPUTATION, final.makespan)
    mean = sum(final.busy) / len(final.busy)
    causes[IMBALANCE] = min(max(final.busy) - mean, left - mean)
    waiting = left - mean - causes[IMBALANCE]
    if unlimited_s is not None:
        causes[MEMORY] = min(max(step_s - unlimited_s, 0.0), waiting)
    outside, between = _waiting(run, final)
    share = (waiting - causes[MEMORY]) / (outside + between) if outside + between else 0.0
    causes[FILL_AND_DRAIN], causes[STEADY_STATE] = outside * share, between * share
    return IdleTime(step_s, mean, causes, _divided(causes[SHARED_LINKS], waits or {}))


def _waiting(plan: Plan, run: Evaluation) -> tuple[float, float]:
    """Idle time over all devices: while the pipeline fills and drains, and in the steady state between."""
    outside = between = 0.0
    for actions, starts, ends in zip(plan.device_actions, run.starts, run.ends, strict=True):
        backwards = [at for at, action in enumerate(actions) if action.kind in COMPUTE_KINDS - {Kind.F}]
        forwards = [at for at, action in enumerate(actions) if action.kind is Kind.F]
        first = backwards[0] if backwards else len(actions)
        last = forwards[-1] if forwards else -1
        now = 0.0
        for position, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if first < position <= last:
                between += start - now
            else:
                outside += start - now
            now = end
        outside += run.makespan - now
    return outside, between


def _divided(seconds: float, waits: Mapping[str, float]) -> dict[str, float]:
    total = sum(waits.values())
    if not seconds or not total:
        return {}
    ranked = sorted(waits.items(), key=lambda item: -item[1])
    return {link: seconds * wait / total for link, wait in ranked if wait}
