"""Even plans: as many operators in each stage."""

import pytest
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode
from panpipe.core.errors import RequestError
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import find_family
from panpipe.core.search.suggestions.even_plan import even_plan


def graph(count):
    return OpGraph(
        tuple(OpNode(f"n{i}", 1.0, parameters=("w",) if i in (0, count - 1) else ()) for i in range(count)),
        tuple(OpEdge(f"n{i}", f"n{i + 1}", 8) for i in range(count - 1)),
    )


def made(count, devices, chunks=1):
    name = "1f1b" if chunks == 1 else "looped"
    schedule = find_family(name).build(ScheduleProblem(devices, 2, chunks))
    return even_plan(graph(count), schedule, {"w": 12})


@pytest.mark.parametrize(
    ("count", "devices", "chunks", "sizes"),
    [(6, 3, 1, [2, 2, 2]), (7, 3, 1, [2, 3, 2]), (5, 2, 2, [1, 1, 2, 1]), (3, 3, 1, [1] * 3)],
)
def test_stages_have_as_many_operators_in_order(count, devices, chunks, sizes):
    plan = made(count, devices, chunks)
    assert [len(stage.nodes) for stage in plan.stages] == sizes
    assert [name for stage in plan.stages for name in stage.nodes] == [f"n{i}" for i in range(count)]
    assert [(weight.name, weight.stages, weight.bytes) for weight in plan.tied] == [("w", (0, len(sizes) - 1), 12)]


def test_fewer_operators_than_stages_are_refused():
    with pytest.raises(RequestError, match="4 stages for 3 operators: a stage needs at least one"):
        made(3, 2, 2)
