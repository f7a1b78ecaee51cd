"""Builds a pipeline from a user's step: creates the team, captures the step, plans, and compares the ranks."""

import inspect
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from attrs import evolve
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule

from ..backends.streams import release_unused
from ..core.capture.export.operators import Operators
from ..core.capture.python.changes import random_states_kept
from ..core.capture.python.guards import Guards
from ..core.capture.python.torch_settings import with_gradients
from ..core.capture.regions.breaks import StepFunction
from ..core.cluster.mesh import Mesh
from ..core.errors import PanpipeError, RequestError
from ..core.garbage import rare_collections
from ..core.lowering.derive import synchronised
from ..core.plan.plan import Plan
from ..core.plan.wording import plan_size
from ..core.search.problem.oracle import predicted_again
from ..core.search.suggestions.preference import preference
from ..core.tensor_collectives import OneRank, communicating
from ..core.validation.validate import validate
from ..core.wording import counted, module_text, value_text
from .batch.example import Example
from .batch.losses import warn_if_cut_changes_loss
from .devices.compute import compute_device
from .devices.devices import assign_devices, device_of_rank
from .devices.heap import SMALL, keep_freed_memory
from .engine.workers import Clock
from .launch.launch import make_team, mesh_for, rank_of_job, replica_here, virtual_team
from .launch.meeting import Meeting
from .launch.progress import Report, progress_lines, silent
from .launch.team import Team
from .options import PipelineOptions
from .pipeline import Pipeline
from .planning.automatic import Planning
from .planning.contest import Contest, arrangement
from .planning.plan_cache import CachedPlans, EarlierPlans
from .programs.stage_compiler import ProgramOptions, StageCompiler
from .replan.replanner import Replanner
from .session import Session
from .tensor_parallel.options import tensors_of
from .trainer import Trainer
from .training.agreement import InitialWeights, check_same, check_same_step, compare_initial_weights, model_in_words
from .update.trials import describe_update
from .watch.activity import HERE
from .weights import Weights, weights_from


class VirtualDevices(Protocol):
    """Devices that this machine does not have."""

    def clock(self, plan: Plan, operators: Operators) -> Clock:
        """The clock of a plan of this captured step.

        Raises:
            RequestError: the times of its operators are unknown.
        """

    def planned(self, operators: Operators, report: Report) -> Plan:
        """A plan of a captured step.

        Raises:
            RequestError: the times of its operators are unknown.
            InfeasibleError: no plan fits in memory.
        """


@with_gradients()
def build_pipeline(
    model: nn.Module,
    step: StepFunction,
    batch: Any,
    options: PipelineOptions,
    virtual: VirtualDevices | None = None,
    report: Report = silent,
) -> Pipeline:
    """Build a pipeline; see ``panpipe.pipeline`` for model, step and example batch.

    Args:
        virtual: simulated devices, all of them in this process; None for real ones.

    Raises:
        RequestError: an argument is wrong.
        InfeasibleError: no plan fits in memory.
    """
    # Ranks profile different stages: generators that differed afterwards would draw different batches.
    with HERE.inside("pipeline()"), random_states_kept(), rare_collections():
        refuse_arguments(model, step)
        return _Builder(unwrapped(model), step, options, virtual, report).pipeline(batch)


def refuse_arguments(model: Any, step: Any) -> None:
    """Refuse a model that is no module or has scripted ones, and a step that cannot be called with it."""
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else value_text(model)
        raise RequestError(f"model is {what}: give an instance of a torch.nn.Module")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise RequestError(
                f"{module_text(name)} is a {type(module).__name__}, whose operators cannot be captured: give the "
                "module that was passed to torch.jit"
            )
    if not callable(step):
        raise RequestError(f"step is {step!r}: give a function step(model, batch) that returns a scalar loss")
    try:
        inspect.signature(step).bind(model, None)
    except ValueError:  # a builtin has no signature
        return
    except TypeError as error:
        raise RequestError(f"step cannot be called as step(model, batch): {error}; give a function of both") from None


def unwrapped(model: nn.Module) -> nn.Module:
    """The module that ``torch.compile``, DataParallel or DistributedDataParallel wraps, under its own names."""
    while True:
        if isinstance(model, OptimizedModule):
            model = model._orig_mod
        elif isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        else:
            return model


class _Builder:
    """Builds a pipeline of a step. Whatever can be checked without the step is checked first: what follows takes time.

    Attributes:
        model, step: what this rank runs.
        programs: how the programs of stages are derived.
    """

    def __init__(
        self,
        model: nn.Module,
        step: StepFunction,
        options: PipelineOptions,
        virtual: VirtualDevices | None,
        report: Report,
    ) -> None:
        self.options, self.virtual, self.report = options, virtual, report
        self.tensors = tensors_of(model, step, options)
        self.model, self.step = self.tensors.program(model, step)
        self.device_type = options.check(self.model)
        self.meeting: Meeting | None = None
        if (rank_of_job() or (0, 1))[1] > 1 and not options.simulated:
            if not self.tensors.divided:
                replica_here(options.plan, options.mesh)  # refuses a mesh for other ranks, before this one waits
            self.meeting = Meeting(options.run.timeout_s)

    def _tensors(self) -> list[Tensor]:
        """The model's tensors; they are not kept, so that those of other ranks can be freed."""
        return [*self.model.parameters(), *self.model.buffers()]

    def pipeline(self, batch: Any) -> Pipeline:
        """The pipeline, from an example batch. A failure of this rank alone is reported to the others."""
        try:
            source = self._capture(batch)
            plan = self.options.plan
            if plan is None and self.virtual is not None:
                plan = self.virtual.planned(self.example.operators, self.report)
            self.team = self._new_team(plan)
            return Pipeline(self._session(plan, source))
        except BaseException as failure:
            self._end(failure)
            raise

    def _end(self, failure: BaseException) -> None:
        """Close what is open, and report a failure of this rank alone to the others."""
        alone = not isinstance(failure, PanpipeError)
        if hasattr(self, "team"):
            if alone:
                self.team.fail(failure)
            self.team.close(failure)
        elif self.meeting is not None:
            if alone and not self.meeting.watch.reported:
                self.meeting.watch.report(failure)
            self.meeting.watch.stop(failure)

    def _capture(self, batch: Any) -> Weights:
        """Capture the step. Returns the source of the model's values."""
        options, model, step, count = self.options, self.model, self.step, self.options.microbatches
        self.report("capturing the step")
        self.example = example = Example.capture(
            model, step, batch, count, options.batch_dims, self.device_type, not self.tensors.divided, options.dynamic
        )
        if (rank_of_job() or (0, 1))[0] == 0:
            warn_if_cut_changes_loss(model, step, batch, example.shape.dims, count, example.trace)
        source = weights_from(options.run.weights, model, options.training.seed)
        source.check(example.read_tensors)
        keep_freed_memory(*([SMALL] if any(tensor.is_meta for tensor in self._tensors()) else []))
        return source

    def _new_team(self, plan: Plan | None) -> Team:
        """The devices, before ranks have compared their arguments; the plan is None if it is not known yet."""
        options, tensors, named = self.options, self.tensors, self.options.named
        mesh = None if tensors.divided else mesh_for(plan, options.mesh)
        if mesh is None and named is not None and rank_of_job() is None:
            mesh = Mesh(len(named))
        if self.device_type == "cuda" and (rank := rank_of_job()) is not None:
            given = options.devices is not None
            here = device_of_rank(named, *rank) if given else compute_device(self._tensors())
            torch.cuda.set_device(here)
        if options.simulated:
            return virtual_team(mesh)
        share, timeout_s = options.run.share_devices, options.run.timeout_s
        return make_team(mesh, options.backend, self.device_type, share, timeout_s, self.meeting, tensors)

    def _session(self, plan: Plan | None, source: Weights) -> Session:
        """Training by a plan, or by the first of those that are found."""
        options, tensors = self.options, self.tensors
        lines = progress_lines(options.run.progress, self.team.first)
        self.programs = ProgramOptions(graphs=options.run.cuda_graphs, report=lines)
        tensors.check_mesh(options.mesh, self.team.mesh)
        tensors.check([self.example])
        initial = self._check_ranks(source)
        planning: Planning | None = None
        with communicating(OneRank()):  # profiles time the operators of one rank; steps communicate with the others
            if plan is None:
                planning = self._planning()
                earlier = self._earlier_plans(planning)
                found = earlier.find() or self._new_plans(planning, earlier)
            else:
                found = CachedPlans((plan,))
            start = time.perf_counter()
            session = self._first_session(found.plans)
        session.trainer.state.steps = options.run.first_step
        session.load(source, initial)
        changes = session.changes
        if self.virtual is None and not tensors.divided:
            reads = Guards(self.model, self.step).key
            changes.replanner = Replanner(self.example, options.planning, self.programs, reads)
        if planning is not None and len(found.plans) > 1 and options.planning.rounds and not options.run.cuda_graphs:
            self._compare(session, found, planning, earlier, time.perf_counter() - start)
        elif changes.replanner is not None:
            changes.replanner.forget_programs()
        if options.run.replan is not None:
            changes.replan_automatically(found.fastest)
        return session

    def _check_ranks(self, source: Weights) -> InitialWeights:
        """Refuse ranks with different arguments, compare their weights, and place the devices.

        All ranks call this together.
        """
        options, example = self.options, self.example
        named, share, compiling = options.named, options.run.share_devices, options.run.compiler
        given = {
            "plan": options.plan and options.plan.hash,
            "microbatches": options.microbatches,
            **options.training.settings,
            "first_step": options.run.first_step,
            "devices": named,
            "share_devices": share,
            "compile": compiling and compiling.name,
            "cuda_graphs": options.run.cuda_graphs,
            "microbatches of": example.shape,
            **model_in_words(self.model, example.operators),
            **describe_update(options.training.optimizer, options.training.scheduler, self.model.named_parameters()),
        }
        check_same(self.team, given)
        check_same_step(self.team, example.operators)
        initial = compare_initial_weights(self.team, self.model, source)
        if initial.warning is not None:
            self.report(initial.warning)
        if self.virtual is None:
            own, model = options.devices is not None, compute_device(self._tensors())
            self.team.where = assign_devices(self.team, named, model, share, own)
        if compiling is not None:
            self.programs = evolve(self.programs, compiler=StageCompiler(compiling.with_threads(self.team.threads)))
        return initial

    def _ready(self, plan: Plan) -> Plan:
        """A plan as the team's devices run it."""
        options, plan = self.options, self.team.tensors.planned(plan, self.team.mesh)
        if options.training.needs_all_stages:
            plan = predicted_again(plan, synchronised(plan), options.planning.oracle)
        _check_plan(plan, self.example.operators, self.team, anywhere=options.simulated)
        return plan

    def _first_session(self, plans: Sequence[Plan]) -> Session:
        """Training by the first of some plans, without values yet; programs are compiled for all of them."""
        options = self.options
        first, *others = [self._ready(plan) for plan in plans]
        clock = None if self.virtual is None else self.virtual.clock(first, self.example.operators)
        self.programs = evolve(self.programs, plans=tuple(o for o in others if arrangement(o) == arrangement(first)))
        trainer = Trainer(
            self.example, first, self.team, options.training, self.programs, clock, options.planning.memory.tier,
            options.run.monitors,
        )  # fmt: skip
        return Session(trainer)

    def _planning(self) -> Planning:
        """The request of an automatic plan."""
        options, optimizer = self.options, self.options.training.optimizer
        return Planning(
            self.example, options.microbatches, self.team, options.planning, optimizer, self.programs, self.report
        )

    def _earlier_plans(self, planning: Planning) -> EarlierPlans:
        """The cached plans of the same request."""
        options = self.options
        others = {
            "compile": options.run.compiler and options.run.compiler.name,
            "update": options.training.parts,
            "devices": options.named,
            **({"cuda_graphs": True} if options.run.cuda_graphs else {}),
        }
        return EarlierPlans(planning, others)

    def _new_plans(self, planning: Planning, earlier: EarlierPlans) -> CachedPlans:
        """The candidates of an automatic plan, the first one first."""
        found = CachedPlans(tuple(planning.candidates()))
        release_unused(self.team.where.values())
        earlier.keep(found)
        plan, count = found.plans[0], len(found.plans) - 1
        others = f"; first steps compare it with {counted(count, 'plan')}" if count else ""
        self.report(
            f"planned: {plan.schedule}, {plan_size(plan)}, predicted step {plan.predicted.step_s * 1e3:.4g} ms{others}"
        )
        return found

    def _compare(
        self, session: Session, found: CachedPlans, planning: Planning, earlier: EarlierPlans, move_s: float
    ) -> None:
        """Begin the contest of several plans.

        Args:
            move_s: seconds in which this rank built the pipeline: a move of stages takes about as long.
        """
        options = self.options
        order = preference([family.name for family in options.planning.families])
        plans = [session.trainer.plan, *map(self._ready, found.plans[1:])]
        longest_s = max(self.team.exchange().gather(move_s)) if options.planning.contest is True else None
        contest = Contest(plans, order, longest_s, options.planning.rounds)

        def rivals(leader: Plan) -> list[Plan]:
            return [self._ready(plan) for plan in planning.rivals(leader, [each.plan for each in contest.candidates])]

        session.changes.compare(
            contest,
            lambda won: earlier.keep(CachedPlans((won.plan,), won.fastest)),
            planning.fitted,
            None if options.run.compiler is not None else rivals,
        )


def _check_plan(plan: Plan, operators: Operators, team: Team, anywhere: bool) -> None:
    """Refuse a plan that is not valid, or not for this model.

    Threads refuse a plan that does not use the first devices of its cluster in order, unless ``anywhere`` is True.
    """
    if plan.graph_hash != operators.graph.hash:
        raise RequestError(
            f"the plan was made for '{plan.model}' (graph {plan.graph_hash[:12]}) but the captured step is "
            f"'{operators.step.model_name}' (graph {operators.graph.hash[:12]}): model, step and shapes must be those "
            "that the plan was made for; plan again"
        )
    in_order = plan.mesh.cluster_devices == tuple(range(plan.devices))
    if len(team.local) == team.size > 1 and not anywhere and not in_order:
        raise RequestError(
            f"the plan uses the devices {list(plan.mesh.cluster_devices)} of its cluster: threads are its devices "
            "in their order; plan for a cluster with its devices in this order, or start ranks with torchrun"
        )
    validate(plan)
