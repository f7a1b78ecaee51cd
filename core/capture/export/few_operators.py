"""The reason why a step has fewer operators than the requested stages, with the line and the change that helps."""

from ...errors import RequestError
from ..graph.nodes import written_arguments
from ..values.user_lines import line_of
from .captured_step import TAIL
from .operators import Operators, computes

_LENGTHS = "needs the values of its lengths"
"""The cause of a region whose first call is given lengths (`..values.value_watch`)."""
_LARGE = 0.5
"""An operator with at least this share of all operations is reported as the reason."""


def refuse_too_few(operators: Operators, stages: int, devices: int | None = None) -> None:
    """Refuse more stages than there are operators.

    Args:
        operators: of the captured step.
        stages: the requested number.
        devices: their number, if the number of stages follows from it.

    Raises:
        RequestError: there are fewer operators; the message has the reason and the fix.
    """
    count = len(operators.graph.nodes)
    if stages <= count:
        return
    most = f"at most {count} device{'s' if count > 1 else ''}" if devices is not None else "fewer stages"
    reason = _reason(operators)
    operator_s = "operator" if count == 1 else "operators"
    raise RequestError(
        f"{stages} stages for {count} {operator_s}: a stage needs at least one; "
        + (f"{reason}; or use {most}" if reason else f"use {most}")
    )


def _reason(operators: Operators) -> str:
    step = operators.step
    if not step.regions:
        return _large(operators)
    name = TAIL if TAIL in step.regions else next(iter(step.regions))
    cause = step.causes.get(name) or "this line needs the value of a tensor"
    what = f"{step.regions[name]}: {cause}"
    if name != TAIL:
        return (
            f"{what}, and module '{name}' stays Python on one stage: move what needs no value out of it, or choose "
            "with torch.where"
        )
    if _LENGTHS in cause:
        return (
            f"{what}, which a captured step does not have, so everything from this line on is one operator: put this "
            "call, the recurrent layers that read what it returns, and pad_packed_sequence into a module of their own; "
            "the layers before and after it are then other stages; without such layers nothing can be divided"
        )
    fix = "move the line and what depends on it into a module, or choose with torch.where"
    if "transform" in cause:
        fix = "call the transform inside a module, on as little of the model as possible"
    elif len(operators.graph.nodes) == 1:
        fix = (
            "if the value is part of the batch, give it as a Python number or text in the batch, so that the step is "
            "captured for each value; else move the line and what depends on it into a module"
        )
    return f"{what}, and everything from there on stays Python, on one stage: {fix}"


def _large(operators: Operators) -> str:
    """The reason why the largest operator cannot be cut, if it has most of the operations."""
    work = [[node for m in members if computes(node := operators.nodes[m])] for members in operators.members.values()]
    nodes = max(work, key=len)
    if len(nodes) < 2 or len(nodes) < _LARGE * sum(map(len, work)):
        return ""
    for node in nodes:
        if written_arguments(node) and (line := line_of(node)):
            return f"{line}: a tensor or buffer is written here in place that most of the step uses: write it later"
    return ""
