"""Plans again between two steps: profile, search for devices with their present speeds, move the stages.

    profiled operators ──▶ slowness of each device ──▶ search ──▶ gain? ──▶ state moves between ranks

The results of training do not depend on the plan, so they have the same bits as without. The new plan is not cached: it
is for devices as they are at this moment.
"""

from collections.abc import Sequence
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from ...core.costs.costs import stage_costs, stage_edges
from ...core.costs.graph import OpGraph
from ...core.costs.message_overhead import MessageLine, with_message_times
from ...core.errors import InfeasibleError, RequestError
from ...core.logs import LOGGER
from ...core.lowering.derive import synchronised
from ...core.plan.plan import Plan
from ...core.plan.wording import plan_size
from ...core.policies.sharding import AUTO, LEVELS, NONE
from ...core.search import Oracle
from ...core.search.choose import plan as search_plan
from ...core.search.problem.blocks import Blocks
from ...core.search.problem.oracle import predicted_again
from ...core.search.suggestions.preference import preference
from ...core.validation.validate import validate
from ..batch.example import Example
from ..checkpoint.checkpoints import Checkpoints
from ..planning.automatic import Planning
from ..planning.contest import Contest
from ..planning.measurements import TIMES
from ..profile.measured_cluster import measured_cluster
from ..programs.stage_compiler import ProgramOptions
from ..settings import PlanningOptions
from ..trainer import Trainer
from ..weights.remote_tensors import as_meta_tensors
from .moving import HELD, MovedWeights, movable, moved_state

LEAST_GAIN = 0.05
"""Share by which the present plan must be predicted to be slower than another one: moving takes some steps, too."""
SECONDS = 10.0
"""Limit on the search."""


class Replanner:
    """Plans again for a pipeline.

    Args:
        example: the captured step, with a real microbatch.
        reads: key of the Python values that the step read when it was captured.
    """

    def __init__(self, example: Example, options: PlanningOptions, programs: ProgramOptions, reads: Any) -> None:
        # With a copy of its microbatch, so that the user's batch may be freed.
        leaves = tuple(leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in example.microbatch.leaves)
        self._example = evolve(example, microbatch=evolve(example.microbatch, leaves=leaves))
        self.options = options
        self._programs, self._reads = programs, reads

    def forget_programs(self) -> None:
        """Derive programs again for the next move: none is expected soon."""
        self._programs = evolve(self._programs, known={})

    def refusal(self, trainer: Trainer) -> RequestError | None:
        """The reason why this pipeline cannot be planned again now; None if it can."""
        reason = None
        states = trainer.stages.states.values()
        frozen_since = [n for s in states for n, p in s.parameters.items() if s.trains(n) and not p.requires_grad]
        if trainer.state.accumulated is not None:
            reason = "gradients wait for an update since step(batch, update=False): replan after a step that updates"
        elif not trainer.training.optimizer:
            reason = "the pipeline has no optimizer, and the state of yours cannot be moved: give optimizer="
        elif trainer.optimizers_lent:
            reason = "pipe.optimizers was read, and its optimizers would be replaced: use scheduler= instead"
        elif frozen_since:
            reason = f"parameter '{frozen_since[0]}' was frozen since its optimizer was created: build another pipeline"
        elif trainer.prepared.key != self._reads:
            reason = "the step reads other Python values than when it was captured: build another pipeline"
        return None if reason is None else RequestError(f"this pipeline cannot be planned again: {reason}")

    def replan(self, trainer: Trainer, checkpoints: Checkpoints) -> bool:
        """Find a plan for the present speeds, move the stages if that is worth it, and log the result.

        All ranks call this together.

        Returns:
            Whether stages were moved.

        Raises:
            RequestError: see `refusal` and `move`.
        """
        with trainer.team.inside("replan"):
            plan = self.better(trainer)
            if plan is not None:
                self.move(trainer, checkpoints, plan)
        return plan is not None

    def contest(self, trainer: Trainer) -> Contest | None:
        """A contest of the present plan and one that is predicted to be faster at the present speeds; None if there is
        none such.

        Arguments and errors as of `replan`.
        """
        with trainer.team.inside("replan"):
            plan, present = self.better(trainer, 0.0), trainer.plan
        if plan is None:
            return None
        if present.prediction is None:
            present = evolve(present, prediction=plan.prediction)
        return Contest([present, plan], preference([family.name for family in self.options.families]))

    def better(self, trainer: Trainer, least_gain: float = LEAST_GAIN) -> Plan | None:
        """A plan that gains enough at the present speeds; None if there is none. The result is logged."""
        trainer.stages.ensure_equal_values()
        trainer.team.agree(self.refusal(trainer))
        slow, plan, present_s = self._find(trainer)
        differs = plan is not None and plan.hash != trainer.plan.hash
        moves = plan is not None and differs and present_s > (1 + least_gain) * plan.predicted.step_s
        if trainer.team.first:
            LOGGER.warning("%s", describe_result(slow, plan, present_s, moves, least_gain))
        return plan if moves else None

    def _find(self, trainer: Trainer) -> tuple[Sequence[float], Plan | None, float]:
        """Profile and search. All ranks call this together, and get the same result.

        Returns:
            How much longer each device takes than the fastest one; the best plan for these speeds, None if none is
            found; and the predicted step of the present one.
        """
        team, plan, options = trainer.team, trainer.plan, self.options
        programs = evolve(self._programs, known={})
        planning = Planning(self._example, plan.microbatches, team, options, trainer.training.optimizer, programs)
        measured = planning.measured
        with as_meta_tensors(trainer.model):
            graphs = measured.graphs()
            graph = measured.graph(graphs)
            prediction = plan.prediction
            known = prediction.cluster if prediction is not None else options.cluster
            cluster = known or measured_cluster(team, measured.where)
            sizes, replicas = measured.sizes, measured.replicas
            wanted = planning.search_options(options.families, cluster)
        wanted = evolve(wanted, max_chunks=options.max_chunks, seconds=SECONDS, shard=self._level(plan))
        slow, oracle = slowness(graphs, team.size), options.oracle
        devices = [slowed(graph, factor) for factor in slow]

        def choose() -> tuple[Plan | None, float]:
            try:
                blocks = Blocks.of(graph, options.boundaries, sizes)
                joined = [blocks.joined(graph) for graph in devices]
                found = search_plan(
                    joined, cluster, plan.microbatches, wanted, parameter_sizes=sizes, replicas=replicas
                )
            except InfeasibleError:
                return None, 0.0
            found = evolve(blocks.expanded(found), mesh=team.mesh)
            if trainer.training.needs_all_stages:
                found = predicted_again(found, synchronised(found), oracle)
            present = plan if prediction is not None else evolve(plan, prediction=found.prediction)
            return found, step_s_on(devices, present, wanted.message, oracle)

        return slow, *team.decide(choose)

    def move(self, trainer: Trainer, checkpoints: Checkpoints, plan: Plan, others: Sequence[Plan] = ()) -> None:
        """Move stages and their state to where another plan has them. All ranks call this together.

        Args:
            others: further plans of the same stages that programs are compiled for.

        Raises:
            RequestError: a rank cannot run the plan; then nothing has changed on any rank.
        """
        team, before, averages = trainer.team, trainer.stages, trainer.averages
        before.ensure_values()
        with before.whole_parameters():
            with team.agreeing():
                validate(plan)
                programs = evolve(self._programs, plans=tuple(others))
                parts = trainer.set_up_plan(self._example, plan, programs=programs)
            checkpoints.wait()
            state = checkpoints.whole_state()
            written = set(self._example.operators.step.mutated_buffers)
            with torch.no_grad():
                own = movable(trainer.model, state)
                on = [plan.stages_on(device) for device in range(team.size)]
                needed = [{name for stage in stages for name in parts.stages.names_of(stage)} for stages in on]
                moved = moved_state(own, team, needed, written)
            scheduler = next(
                (s for s in team.in_replica(lambda _: state.items.get("scheduler")) if s is not None), None
            )
            before.hand_over()
            trainer.replace(parts)
            trainer.stages.load(MovedWeights(moved.section(HELD)), before.initial)
        with trainer.stages.whole_parameters():
            averages.follow(
                trainer.stages, [moved.section(f"ema.{number}.tensors") for number in range(len(averages.all))]
            )
            checkpoints.follow(trainer.stages)
            found = checkpoints.whole_state()
            for section, source in (("optimizer", moved), ("stepped", moved), ("progress", state)):
                found.add(section, source.section(section))
            found.items |= {} if scheduler is None else {"scheduler": scheduler}
            checkpoints.load(found)

    def _level(self, plan: Plan) -> str:
        """What replicas share in a new plan: as in the present one, or where it is asked for what does not fit."""
        if not plan.shard:
            return NONE
        return AUTO if self.options.shard == AUTO else max(plan.shard, key=LEVELS.index)


def describe_result(
    slow: Sequence[float], plan: Plan | None, present_s: float, replaced: bool, least_gain: float = LEAST_GAIN
) -> str:
    """The result of planning again, in one line.

    Args:
        slow: how much longer each device takes than the fastest one.
        plan: the best one for these speeds, with its prediction; None if none fits.
        present_s: predicted step of the present plan at these speeds.
    """
    if plan is None:
        return "no plan fits the devices at their present speeds: the present one stays"
    named = [f"device {d} takes {f:.2f} times as long as the fastest" for d, f in enumerate(slow) if f > 1]
    why, step_s = ", ".join(named) or "all devices are equally fast", plan.predicted.step_s
    if not replaced:
        gain = f"to gain {least_gain:.0%} over the present one" if least_gain else "to be faster than the present one"
        return f"{why}; no plan is predicted {gain}: it stays"
    return (
        f"{why}; a faster plan is {plan.schedule}, {plan_size(plan)}: predicted step {step_s * 1e3:.4g} ms, "
        f"{present_s / step_s - 1:+.0%} against {present_s * 1e3:.4g} ms of the plan before"
    )


EQUALLY_FAST = 0.1
"""Devices whose times differ by less than this share are taken as equally fast: profiles vary as much."""


def slowness(graphs: Sequence[OpGraph], devices: int) -> tuple[float, ...]:
    """How much longer each device along the pipeline takes than the fastest one for the same work: 1 or more.

    Args:
        graphs: the operators as each device measured them, replica by replica; the slowest replica counts.
        devices: along the pipeline.
    """
    took = [sum(n.forward_s + n.backward_input_s + n.backward_weight_s for n in graph.nodes) for graph in graphs]
    by_position = [max(took[device::devices]) for device in range(devices)]
    least = min(by_position)
    found = [seconds / least if least > 0 else 1.0 for seconds in by_position]
    return tuple(found) if max(found) > 1 + EQUALLY_FAST else (1.0,) * devices


def step_s_on(graphs: Sequence[OpGraph], plan: Plan, message: MessageLine, oracle: Oracle) -> float:
    """The predicted step of a plan on devices of different speeds, in seconds.

    Args:
        graphs: the operators with their times on each device.
        plan: with a prediction, whose cluster counts.
        message: the time that a message takes of the devices at its ends.
    """
    stages = [stage.nodes for stage in plan.stages]
    tables = [stage_costs(graph, stages) for graph in graphs]
    own = [tables[stage.device][stage.index] for stage in plan.stages]
    costs = with_message_times(own, plan.placement, stage_edges(graphs[0], stages), message)
    return oracle(evolve(plan, prediction=None), tuple(costs), plan.predicted.cluster).step_s


def slowed(graph: OpGraph, factor: float) -> OpGraph:
    """The graph with the times of all operators multiplied by ``factor``."""
    names = *TIMES, "optimizer_s"
    nodes = (evolve(node, **{name: getattr(node, name) * factor for name in names}) for node in graph.nodes)
    return evolve(graph, nodes=tuple(nodes))
