"""The reason why a step has fewer operators than the requested stages, with the line and the change that helps."""

from ...errors import RequestError
from ..graph.nodes import written_arguments
from ..values.user_lines import line_of
from .captured import TAIL
from .operators import Operators, computes

_LARGE = 0.5
"""Share of all operations from which an operator is the reason."""


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
    if TAIL in step.regions:
        what = f"{step.regions[TAIL]}: {_cause(operators, TAIL)}, and all from there on stays Python on one stage"
        if "transform" in _cause(operators, TAIL):
            return f"{what}: transform within a module, and as little of the model as possible"
        if len(operators.graph.nodes) == 1:
            return (
                f"{what}: if the value is part of the batch, give it as a Python number or text in the batch, so that "
                "the step is captured for each value; else move the line and what depends on it into a module"
            )
        return f"{what}: move the line and what depends on it into a module, or choose with torch.where"
    if step.regions:
        name, line = next(iter(step.regions.items()))
        return (
            f"{line}: {_cause(operators, name)}, and module '{name}' stays Python on one stage: move what needs no "
            "value out of it, or choose with torch.where"
        )
    return _large(operators)


def _cause(operators: Operators, region: str) -> str:
    return operators.step.causes.get(region) or "this line needs the value of a tensor"


def _large(operators: Operators) -> str:
    """The reason why the largest operator cannot be cut, if it has most of the operations."""
    work = {
        name: [operators.nodes[m] for m in members if computes(operators.nodes[m])]
        for name, members in operators.members.items()
    }
    name, nodes = max(work.items(), key=lambda item: len(item[1]))
    if len(nodes) < 2 or len(nodes) < _LARGE * sum(map(len, work.values())):
        return ""
    for node in nodes:
        if written_arguments(node) and (line := line_of(node)):
            return f"{line}: a tensor or buffer is written here in place that most of the step uses: write it later"
    lines = list(dict.fromkeys(filter(None, map(line_of, nodes))))
    where = f"{lines[0]} to {lines[-1]}" if len(lines) > 1 else next(iter(lines), name)
    return f"{where}: tensors between these operators are not contiguous, so no cut is possible: call .contiguous()"
