"""Options for deriving and caching the programs of stages."""

from attrs import field, frozen

from ...core.plan.plan import Plan
from ..launch.progress import Report, silent
from .compiled import Programs
from .stage_compiler import StageCompiler


@frozen
class ProgramOptions:
    """How the programs of stages are derived.

    Args:
        compiler: compiles sections of programs; None to run operators one by one.
        graphs: whether they are captured as CUDA graphs.
        plans: further plans of the same stages that the programs are compiled for.
        known: programs of the example, which are reused; new ones are added.
        report: called with what is captured after planning, if it takes long.
    """

    compiler: StageCompiler | None = None
    graphs: bool = False
    plans: tuple[Plan, ...] = ()
    known: Programs = field(factory=dict)
    report: Report = silent
