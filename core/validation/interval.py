"""The interval of a predicted step, from the errors of earlier predictions compared with published runs.

It depends on what a plan's devices exchange (`PUBLISHED_ERRORS`); devices of the catalogue of which no run was compared
have an error of their own (``DeviceType.step_error``). For a prediction from measured costs, the interval follows from
the noise of the measurements instead.
"""

from attrs import evolve

from ..cluster.tensor_groups import GroupedCluster
from ..plan.plan import Plan, Prediction
from ..policies.sharding import part_of_parameters

TENSOR, SHARDED, OTHER = "tensor ranks", "sharded parameters", "neither"
PUBLISHED_ERRORS = {TENSOR: 0.10, SHARDED: 0.21, OTHER: 0.16}
"""The worst error of the published runs of each kind (``benchmarks/results/published_runs.md``), rounded up. Others
have that of runs with context ranks; no run with expert ranks was compared."""


def published_kind(plan: Plan) -> str:
    """The kind of published runs that a plan is like."""
    cluster = plan.predicted.cluster
    ranks = cluster if isinstance(cluster, GroupedCluster) else plan.mesh
    if ranks.context > 1 or ranks.experts > 1:
        return OTHER
    return SHARDED if any(map(part_of_parameters, plan.shard)) else TENSOR if ranks.width > 1 else OTHER


def with_step_error(plan: Plan, error: float | None) -> Plan:
    """The plan with the interval that contains 9 of 10 steps.

    Args:
        plan: with its prediction.
        error: bound of \\|predicted ÷ measured − 1\\| for its devices; at least that of its kind of runs is taken. None
            if it is not known; then the plan is returned unchanged.
    """
    if error is None or plan.prediction is None:
        return plan
    error = max(error, PUBLISHED_ERRORS[published_kind(plan)])
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
