"""The numbers in a step's result: loss, weight, metrics, and the device that computes each."""

from collections.abc import Sequence
from typing import Any

from attrs import frozen

from ...core.capture.graph.outputs import StepOutputs
from ..programs.compiled import Compiled


@frozen
class Computed:
    """A number of the step's result, for one microbatch.

    Args:
        name: its node in the captured graph.
        device: the device that computes it.
    """

    name: str
    device: int


Part = Computed | float
"""A number that a device computes, or a constant of the step."""

LOSS, WEIGHT = 0, 1
"""Positions of a microbatch's loss and weight among its parts."""


def parts_of(compiled: Compiled, placement: Sequence[int]) -> list[Part | None]:
    """The parts of a microbatch's result: loss, weight, metrics; none for a function that returns rows.

    The weight is None if the step returns none.

    Args:
        compiled: the programs of all stages.
        placement: stage → device.
    """
    outputs, nodes = compiled.operators.step.outputs, compiled.operators.nodes

    def part(value: Any) -> Part | None:
        if isinstance(value, str) and value in nodes:
            return Computed(value, placement[compiled.stage_of(value)])
        return float(value) if isinstance(value, int | float) else None

    if not isinstance(outputs, StepOutputs):
        return []
    return [part(outputs.loss), part(outputs.weight), *(part(value) or 0.0 for value in outputs.metrics.values())]
