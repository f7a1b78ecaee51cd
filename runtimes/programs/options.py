"""How the programs of stages are derived, and which of them are kept."""

from attrs import field, frozen

from ..batch.shapes import MAX_SHAPES
from .compiled import Programs
from .stage_compiler import StageCompiler


@frozen
class ProgramOptions:
    """How the programs of stages are derived.

    Args:
        compiler: compiles them; None where operators run one by one.
        max_shapes: for how many shapes of microbatches programs are kept.
        known: programs of the example that are derived already; new ones are added.
    """

    compiler: StageCompiler | None = None
    max_shapes: int = MAX_SHAPES
    known: Programs = field(factory=dict)
