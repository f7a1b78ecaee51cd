"""The facts that a report shows in addition to its plan and traces."""

from collections.abc import Sequence
from enum import StrEnum

from attrs import field, frozen

from ..timing.idle import IdleTime
from ..timing.not_offloaded import NotOffloaded


class Checked(StrEnum):
    """The subject of a check."""

    RESULT = "result"
    """A computed value. If the check fails, the program has failed."""
    PREDICTION = "prediction"
    """A predicted value. If the check fails, the prediction missed, and the computed values are still right."""


@frozen
class Check:
    """One check with its outcome.

    Args:
        name: a few words: ``loss equals one process``.
        value: the outcome as text: ``0 of 0 bits differ``.
        verdict: True passed, False failed, None for a figure without a pass criterion.
        about: a result, or a prediction.
    """

    name: str
    value: str
    verdict: bool | None = None
    about: Checked = Checked.RESULT

    @property
    def failed(self) -> bool:
        """Whether a result is wrong."""
        return self.verdict is False and self.about is Checked.RESULT

    @property
    def missed(self) -> bool:
        """Whether a prediction missed."""
        return self.verdict is False and self.about is Checked.PREDICTION


@frozen
class ReportFacts:
    """Optional contents of the page; without a fact, its part of the page is omitted.

    Args:
        title: headline; None for the plan's model.
        summary: one or two sentences below it; None for a sentence about the plan.
        losses: loss of each training step, in order.
        reference_losses: losses of the same steps by one process, drawn over them.
        step_times_s: measured time of every timed step, in seconds; their median is the headline's measured time.
        one_process_step_s: time of the same step by one process, for the speed-up.
        limits_bytes: memory limit per device; None for the memory of the prediction's cluster.
        checks: checks with their outcomes.
        notes: sentences for the end of the page.
        idle: the idle time of the predicted step by cause.
        kept: saved tensors that stay on the devices of a plan that offloads.
        plain_units: whether times and sizes are in the unit of abstract costs, not in seconds and bytes.
    """

    title: str | None = None
    summary: str | None = None
    losses: tuple[float, ...] = field(default=(), converter=tuple)
    reference_losses: tuple[float, ...] = field(default=(), converter=tuple)
    step_times_s: tuple[float, ...] = field(default=(), converter=tuple)
    one_process_step_s: float | None = None
    limits_bytes: tuple[float, ...] | None = None
    checks: tuple[Check, ...] = field(default=(), converter=tuple)
    notes: Sequence[str] = ()
    idle: IdleTime | None = None
    kept: tuple[NotOffloaded, ...] = ()
    plain_units: bool = False
