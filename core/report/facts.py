"""What a report can tell beside its plan and traces."""

from attrs import field, frozen

from ..idle import IdleTime


@frozen
class Check:
    """One thing that was checked.

    Args:
        name: what, in a few words: ``loss equals one process``.
        value: what was found, as text: ``0 of 0 bits differ``.
        verdict: True passed, False failed, None for a figure that nothing was asked of.
    """

    name: str
    value: str
    verdict: bool | None = None


@frozen
class ReportFacts:
    """Everything here may be left out, and its part of the page then is too.

    Args:
        title: headline; None for the plan's model.
        summary: one or two sentences below it; None for a sentence about the plan.
        losses: loss of each training step, in order.
        reference_losses: the same steps by one process, to lay over them.
        step_times_s: measured time of every timed step, in seconds; their median is the headline's measured time.
        one_process_step_s: time of the same step by one process, for the speed-up.
        limits_bytes: memory limit per device; None for the memory of the prediction's cluster.
        checks: what was checked, with its result.
        notes: sentences for the end of the page.
        idle: why the predicted step is not faster.
    """

    title: str | None = None
    summary: str | None = None
    losses: tuple[float, ...] = field(default=(), converter=tuple)
    reference_losses: tuple[float, ...] = field(default=(), converter=tuple)
    step_times_s: tuple[float, ...] = field(default=(), converter=tuple)
    one_process_step_s: float | None = None
    limits_bytes: tuple[float, ...] | None = None
    checks: tuple[Check, ...] = field(default=(), converter=tuple)
    notes: tuple[str, ...] = field(default=(), converter=tuple)
    idle: IdleTime | None = None
