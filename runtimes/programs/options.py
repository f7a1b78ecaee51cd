"""Options for deriving and caching the programs of stages."""

from attrs import field, frozen

from ...core.plan.plan import Plan
from ...core.whole_numbers import whole_number
from .compiled import Programs
from .stage_compiler import StageCompiler

MAX_SHAPES = 8
"""Default number of shapes of microbatches whose programs are kept: each costs a capture, and memory."""


@frozen
class ProgramOptions:
    """How the programs of stages are derived.

    Args:
        compiler: compiles sections of programs; None to run operators one by one.
        max_shapes: number of shapes of microbatches whose programs are kept.
        graphs: whether they are captured as CUDA graphs.
        plans: further plans of the same stages that the programs are compiled for.
        known: programs of the example, which are reused; new ones are added.
    """

    compiler: StageCompiler | None = None
    max_shapes: int = MAX_SHAPES
    graphs: bool = False
    plans: tuple[Plan, ...] = ()
    known: Programs = field(factory=dict)


def check_max_shapes(limit: int) -> None:
    """Refuse a number of kept shapes below 1: the current shape is always kept.

    Raises:
        RequestError: it is below 1, or no whole number.
    """
    whole_number("max_shapes", limit, 1)
