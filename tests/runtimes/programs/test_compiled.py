"""Programs of stages: which are derived, which are reused, where results are computed, and what is refused."""

import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.runtimes.programs.compiled import compile_possibly_empty, compile_stages

from ...support.stages.two_stages import TwoStages


@pytest.fixture(scope="module")
def operators():
    return TwoStages().compiled.operators


def cut(operators, at):
    names = [node.name for node in operators.graph.nodes]
    return [names[:at], names[at:]]


def test_only_the_wanted_stages_have_programs(operators):
    compiled = compile_stages(operators, cut(operators, 2), [1])
    assert list(compiled.programs) == [1]
    assert list(compiled.layout) == [(0, 1)]


def test_known_programs_are_reused_for_the_same_cut_stage_and_device(operators):
    known = {}
    first = compile_stages(operators, cut(operators, 2), range(2), known=known)
    assert len(known) == 2
    again = compile_stages(operators, cut(operators, 2), [0], known=known)
    assert again.programs[0] is first.programs[0]
    other = compile_stages(operators, cut(operators, 1), [0], known=known)
    assert other.programs[0] is not first.programs[0]
    placed = compile_stages(operators, cut(operators, 2), [0], {0: torch.device("cpu")}, known=known)
    assert placed.programs[0] is not first.programs[0]
    assert len(known) == 4


def test_result_is_computed_by_the_stage_of_its_operator_or_with_the_loss(operators):
    compiled = compile_stages(operators, cut(operators, 2), [])
    assert compiled.stage_of(operators.step.outputs.loss) == 1
    assert compiled.stage_of("a constant of no operator") == 1
    first = next(name for name, owner in operators.owner.items() if owner == compiled.stages[0][0])
    assert compiled.stage_of(first) == 0


def test_stages_of_traced_operators_run_no_python(operators):
    compiled = compile_stages(operators, cut(operators, 2), [])
    assert [compiled.runs_python(stage) for stage in range(2)] == [False, False]


def test_compiler_derives_the_programs_that_are_not_known(operators):
    asked = []

    class Compiler:
        def programs(self, graph, index):
            asked.append(index)
            return f"programs of stage {index}"

    found = compile_stages(operators, cut(operators, 2), [1, 0], compiler=Compiler())
    assert (found.programs, asked) == ({1: "programs of stage 1", 0: "programs of stage 0"}, [1, 0])


def test_stage_without_operators_is_refused_in_a_plan_and_kept_for_another_shape(operators):
    empty = [*cut(operators, 2), []]
    with pytest.raises(RequestError, match="stage 2 has no operators: every stage needs one; use fewer stages"):
        compile_stages(operators, empty, [0])
    assert list(compile_possibly_empty(operators, empty, [0]).programs) == [0]
