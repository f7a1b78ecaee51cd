"""Plans from stages and a schedule: tied weights, their replicas, and what is refused."""

import pytest
from attrs import evolve
from panpipe.core.costs.costs import StageCosts, StageEdge
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode
from panpipe.core.errors import RequestError
from panpipe.core.plan.plan import TiedWeight
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import find_family
from panpipe.core.search.problem.assemble import assemble, replica_share, with_replicas

NODES = (
    OpNode("a", 1.0, parameter_bytes=10, state_bytes=40, parameters=("w",)),
    OpNode("b", 1.0, parameter_bytes=6, state_bytes=24, parameters=("v",)),
    OpNode("c", 1.0, parameters=("w",)),
)
GRAPH = OpGraph(NODES, (OpEdge("a", "b", 8), OpEdge("b", "c", 4)))
SCHEDULE = find_family("1f1b").build(ScheduleProblem(2, 2))


def test_assembled_plan_has_the_stages_edges_and_tied_weights_of_the_graph():
    plan = assemble(GRAPH, [["a"], ["b", "c"]], SCHEDULE)
    assert [(s.index, s.device, s.nodes, s.parameters) for s in plan.stages] == [
        (0, 0, ("a",), ("w",)), (1, 1, ("b", "c"), ("v", "w")),
    ]  # fmt: skip
    assert plan.edges == (StageEdge(0, 1, 8, 8),)
    assert plan.tied == (TiedWeight("w", (0, 1), 10),)
    assert plan.device_actions == SCHEDULE.device_actions
    assert (plan.microbatches, plan.prediction) == (2, None)
    assert assemble(GRAPH, [["a"], ["b", "c"]], SCHEDULE, parameter_sizes={"w": 12}).tied[0].bytes == 12


def test_replica_of_a_tied_weight_costs_its_stage_parameters_gradients_and_optimizer_state():
    assert replica_share(GRAPH) == 2.0  # Adam: two numbers a parameter, next to it and its gradient
    first, second = with_replicas(
        GRAPH, (StageCosts(1.0, 1.0, 1.0), StageCosts(1.0, 1.0, 1.0)), [TiedWeight("w", (0, 1), 10)]
    )
    assert first == StageCosts(1.0, 1.0, 1.0)
    assert (second.parameter_bytes, second.gradient_bytes, second.optimizer_bytes) == (10, 10, 20)


def test_copy_of_a_frozen_tied_weight_costs_its_stage_parameters_alone():
    frozen = OpGraph((evolve(NODES[0], state_bytes=10, trained_bytes=0, frozen=("w",)), *NODES[1:]), GRAPH.edges)
    _, second = with_replicas(frozen, (StageCosts(1.0, 1.0, 1.0),) * 2, [TiedWeight("w", (0, 1), 10)])
    assert second == StageCosts(1.0, 1.0, 1.0, parameter_bytes=10)


def test_partition_with_another_number_of_stages_is_refused():
    with pytest.raises(RequestError, match="places 2 stages and the partition has 1"):
        assemble(GRAPH, [["a", "b", "c"]], SCHEDULE)
