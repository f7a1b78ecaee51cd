"""The numbers of a step's result, for each microbatch: loss, weight, metrics, numbers in texts; who computes each."""

from collections.abc import Sequence
from typing import Any

from attrs import frozen

from ...core.capture.graph.outputs import StepOutputs
from ..programs.compiled import Compiled


@frozen
class Computed:
    """A part of the step's result for one microbatch.

    Args:
        name: its node in the captured graph.
        device: the device that computes it.
    """

    name: str
    device: int


Part = Computed | float

WEIGHT = 1
"""Position of a microbatch's weight among its parts."""


def parts_of(compiled: Compiled, placement: Sequence[int]) -> list[Part | None]:
    """Loss, weight, metrics, numbers in texts: each computed somewhere, or a number; None for a weight there is not.

    Of a function that returns rows, numbers in texts alone.
    """
    outputs, nodes = compiled.operators.step.outputs, compiled.operators.nodes

    def part(value: Any) -> Part | None:
        if isinstance(value, str) and value in nodes:
            return Computed(value, placement[compiled.stage_of(value)])
        return float(value) if isinstance(value, int | float) else None

    if not isinstance(outputs, StepOutputs):
        return [part(value) or 0.0 for value in outputs.texts]
    others = [*outputs.metrics.values(), *outputs.texts]
    return [part(outputs.loss), part(outputs.weight), *(part(value) or 0.0 for value in others)]
