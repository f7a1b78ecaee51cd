"""A captured step compiled for a plan: the programs of some stages, for one shape of microbatch."""

from collections.abc import Iterable, Sequence

from attrs import frozen

from ..core.capture.operators import Operators
from ..core.capture.programs import StagePrograms, stage_programs
from ..core.capture.stage import boundaries, stage_graph
from ..core.errors import RequestError
from .stage_run import Layout


@frozen
class Compiled:
    """Programs for one shape of microbatch.

    Args:
        operators: the captured step.
        layout: the tensors of every message between stages.
        programs: by stage index.
    """

    operators: Operators
    layout: Layout
    programs: dict[int, StagePrograms]


def compile_stages(operators: Operators, stages: Sequence[Sequence[str]], wanted: Iterable[int]) -> Compiled:
    """Derive the programs of some stages.

    Args:
        operators: the captured step.
        stages: names of the operators of every stage.
        wanted: indices of the stages to compile.

    Raises:
        RequestError: the stages do not cover the step's operators, or one of them cannot become programs.
    """
    if any(not stage for stage in stages):
        empty = next(i for i, stage in enumerate(stages) if not stage)
        raise RequestError(f"stage {empty} has no operators: every stage needs one; use fewer stages")
    layout = boundaries(operators, stages)
    return Compiled(operators, layout, {i: stage_programs(stage_graph(operators, stages, i)) for i in wanted})
