"""The interval of a predicted step, from the errors of earlier predictions compared with published runs.

A catalogue device has such an error (``DeviceType.step_error``). For a prediction from measured costs, the interval
follows from the noise of the measurements instead.
"""

from attrs import evolve

from .plan import Plan, Prediction


def with_step_error(plan: Plan, error: float | None) -> Plan:
    """The plan with the interval that contains 9 of 10 steps.

    Args:
        plan: with its prediction.
        error: bound of \\|predicted ÷ measured − 1\\|; None if it is not known; then the plan is returned
            unchanged.
    """
    if error is None or plan.prediction is None:
        return plan
    step_s = plan.prediction.step_s
    interval = step_s / (1 + error), step_s / (1 - error)
    return evolve(plan, prediction=evolve(plan.prediction, interval_s=interval))


def interval_of(prediction: Prediction | None, step_s: float) -> tuple[float, float] | None:
    """The prediction's interval around another step time, such as the simulated one; None if it has none."""
    if prediction is None or prediction.interval_s is None or not prediction.step_s:
        return None
    low, high = prediction.interval_s
    return low * step_s / prediction.step_s, high * step_s / prediction.step_s


def interval_text(prediction: Prediction | None) -> str:
    """`` ± 10 %``, or nothing for a prediction without an interval."""
    bounds = interval_of(prediction, 1.0)
    return "" if bounds is None else f" ± {100 * (bounds[1] - bounds[0]) / 2:.0f} %"
