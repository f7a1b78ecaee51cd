"""Options for deriving and caching the programs of stages."""

from attrs import field, frozen

from ..batch.shapes import MAX_SHAPES
from .compiled import Programs
from .stage_compiler import StageCompiler


@frozen
class ProgramOptions:
    """How the programs of stages are derived.

    Args:
        compiler: compiles groups of operators; None to run operators one by one.
        max_shapes: number of shapes of microbatches whose programs are kept.
        known: programs of the example, which are reused; new ones are added.
    """

    compiler: StageCompiler | None = None
    max_shapes: int = MAX_SHAPES
    known: Programs = field(factory=dict)
