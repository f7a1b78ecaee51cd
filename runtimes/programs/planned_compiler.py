"""Compiles those programs of a stage that a plan runs; another one is compiled if it is called nevertheless."""

from collections.abc import Collection, Mapping

from attrs import frozen

from ...core.actions import Kind
from ...core.capture.programs.generated_code import Program
from ...core.capture.programs.stage import StageGraph
from ...core.capture.programs.stage_programs import StagePrograms
from ...core.plan.plan import Plan
from .stage_compiler import StageCompiler


@frozen
class PlannedCompiler:
    """Compiles what a plan runs.

    Args:
        compiler: compiles sections of programs.
        kinds: stage → the kinds of its actions.
        recompute: the stages that recompute their forward.
    """

    compiler: StageCompiler
    kinds: Mapping[int, Collection[Kind]]
    recompute: Collection[int]

    @classmethod
    def of(cls, compiler: StageCompiler | None, *plans: Plan) -> "PlannedCompiler | None":
        """The compiler of the programs that some plans of the same stages run; None without compilation."""
        if compiler is None:
            return None
        kinds: dict[int, set[Kind]] = {}
        for actions in (actions for plan in plans for actions in plan.device_actions):
            for action in actions:
                kinds.setdefault(action.stage, set()).add(action.kind)
        return cls(compiler, kinds, plans[0].memory.recompute)

    def programs(self, stage: StageGraph, index: int) -> StagePrograms:
        """The compiled programs of a stage; warns of what does not compile.

        Args:
            stage: its graph.
        """
        kinds, again = self.kinds.get(index, ()), index in self.recompute
        return self.compiler.programs(stage, index, lambda found: programs_run(found, kinds, again))


def programs_run(programs: StagePrograms, kinds: Collection[Kind], again: bool) -> list[Program]:
    """The programs that actions of some kinds run.

    Args:
        programs: of a stage.
        again: whether the stage recomputes its forward.
    """
    backward = any(kind is not Kind.F for kind in kinds)
    found = [programs.forward_alone if again else programs.forward]
    found += [programs.recompute.run] if again and backward else []
    first, second = programs.backward_input, programs.backward_weight
    split = first is not None and second is not None and Kind.I in kinds
    if programs.backward is not None and (Kind.B in kinds or (backward and not split)):
        found.append(programs.backward.run)
    if first is not None and second is not None and split:
        found += [first.run, second.run]
    return found
