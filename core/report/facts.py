"""What a report can tell beside its plan and traces."""

from enum import StrEnum

from attrs import field, frozen

from ..evaluate.idle import IdleTime


class Checked(StrEnum):
    """What a check is about."""

    RESULT = "result"
    """What was computed. Where it fails, the program that computed it has failed."""
    PREDICTION = "prediction"
    """What was said before. Where it fails, the prediction missed; what was computed is right all the same."""


@frozen
class Check:
    """One thing that was checked.

    Args:
        name: what, in a few words: ``loss equals one process``.
        value: what was found, as text: ``0 of 0 bits differ``.
        verdict: True passed, False failed, None for a figure that nothing was asked of.
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
