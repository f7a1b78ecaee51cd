"""The programs of some stages of a plan, for one shape of microbatch."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

import torch
from attrs import evolve, field, frozen

from ...core.capture.export.operators import Operators
from ...core.capture.export.step import symbolic_sizes
from ...core.capture.graph.sizes import Sizes
from ...core.capture.programs.programs import stage_programs
from ...core.capture.programs.stage import Boundary, StageGraph, boundaries, stage_graph
from ...core.capture.programs.stage_programs import StagePrograms
from ...core.capture.regions.regions import runs_region
from ...core.errors import RequestError

Layout = dict[tuple[int, int], tuple[Boundary, ...]]
"""(sender, reader) → the tensors of their messages."""


@frozen
class Compiled:
    """Programs for one shape of microbatch.

    Args:
        stages: names of the operators of every stage.
        symbolic: the programs with symbolic sizes that these come from; None without.
    """

    operators: Operators
    stages: Sequence[Sequence[str]]
    layout: Layout
    programs: dict[int, StagePrograms]
    symbolic: "Compiled | None" = field(default=None, eq=False, repr=False)

    def with_sizes(self, sizes: Sizes) -> "Compiled":
        """The programs with numbers in place of symbolic sizes."""
        layout = {pair: tuple(b.with_sizes(sizes) for b in tensors) for pair, tensors in self.layout.items()}
        programs = {index: programs.with_sizes(sizes) for index, programs in self.programs.items()}
        values = self.operators.values
        results = {name: sizes.tensor(values[name]) for name in self.operators.step.outputs.nodes}
        return Compiled(evolve(self.operators, values=values | results), self.stages, layout, programs, self)

    def stage_of(self, result: str) -> int:
        """The stage that computes a part of the step's result, by the name of its node."""
        owner = self.operators.owner.get(result)
        if owner is None:  # any stage could compute it: the loss's stage does
            return self.stage_of(self.operators.step.outputs.main_result)
        return next(i for i, names in enumerate(self.stages) if owner in names)

    def runs_python(self, stage: int) -> bool:
        """Whether a stage runs a part of the step that stays Python."""
        members, nodes = self.operators.members, self.operators.nodes
        return any(runs_region(nodes[node]) for name in self.stages[stage] for node in members[name])


Programs = dict[tuple[tuple[tuple[str, ...], ...], int, torch.device | None, bool], StagePrograms]
"""Programs of one captured step by (operators of every stage, index, device, whether sizes are symbols)."""


ProgramCompiler = Callable[[StageGraph, int], StagePrograms]
"""Derives the compiled programs of a stage, from its graph and its number."""


def compile_stages(
    operators: Operators,
    stages: Sequence[Sequence[str]],
    wanted: Iterable[int],
    where: Mapping[int, torch.device] | None = None,
    compiler: ProgramCompiler | None = None,
    known: Programs | None = None,
    may_be_empty: bool = False,
) -> Compiled:
    """Derive the programs of some stages of a plan. Those of a capture with symbolic sizes serve all sizes.

    Args:
        stages: names of the operators of every stage.
        where: stage → its device; by default the device that the step was captured for.
        compiler: compiles sections of programs; None to run operators one by one.
        known: programs of this captured step and compiler, which are reused; new ones are added.
        may_be_empty: whether stages may have no operators: a step of another shape may have fewer than the planned one.

    Raises:
        RequestError: the stages do not cover the step's operators, or a stage has no valid programs.
    """
    empty = next((i for i, stage in enumerate(stages) if not stage), None)
    if empty is not None and not may_be_empty:
        raise RequestError(f"stage {empty} has no operators: every stage needs one; use fewer stages")
    wanted = list(wanted)
    if operators.symbolic is not None and compiler is None:
        whole, sizes = operators.symbolic
        symbols = whole.step.sizes
        # The programs with numbers raise the user's errors.
        with suppress(Exception), symbolic_sizes(symbols is not None and symbols.of_parts):
            made = compile_stages(whole, stages, wanted, where, None, known, may_be_empty)
            return evolve(made.with_sizes(sizes), operators=operators)
    layout, devices = boundaries(operators, stages), where or {}
    programs = {} if known is None else known
    names, symbolic = tuple(map(tuple, stages)), operators.step.sizes is not None
    keys = {i: (names, i, devices.get(i), symbolic) for i in wanted}
    for i, key in keys.items():
        if key not in programs:
            graph = stage_graph(operators, stages, i, devices.get(i))
            programs[key] = stage_programs(graph) if compiler is None else compiler(graph, i)
    return Compiled(operators, stages, layout, {i: programs[key] for i, key in keys.items()})
