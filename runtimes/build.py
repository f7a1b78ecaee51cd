"""Builds a pipeline from a user's step: creates the team, captures the step, plans, and compares the ranks."""

import inspect
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from attrs import evolve
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from ..backends.streams import release_unused
from ..core.capture.export.operators import Operators
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
from ..core.wording import counted
from .batch.example import Example
from .batch.losses import warn_if_cut_changes_loss
from .devices.compute import compute_device
from .devices.devices import assign_devices, device_of_rank
from .devices.heap import SMALL, keep_freed_memory
from .engine.clocked import VirtualDevices
from .launch.agreement import InitialWeights, check_same, check_same_step, compare_initial_weights, model_in_words
from .launch.launch import make_team, mesh_for, rank_of_job, replica_here, virtual_team, world_size
from .launch.meeting import Meeting
from .launch.progress import Report, progress_lines, silent
from .launch.rank_tensors import RankTensors
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
from .update.optimizers import describe_update
from .watch.activity import HERE
from .weights import Weights, weights_from


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
    with HERE.inside("pipeline()"), random_states_kept(), rare_collections():
        refuse_arguments(model, step)
        return _check_and_build(unwrapped(model), step, batch, options, virtual, report)


def refuse_arguments(model: Any, step: Any) -> None:
    """Refuse a model that is no module, and a step that cannot be called with it."""
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise RequestError(f"model is {what}: give an instance of a torch.nn.Module")
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


def _check_and_build(
    model: nn.Module,
    step: StepFunction,
    batch: Any,
    options: PipelineOptions,
    virtual: VirtualDevices | None,
    report: Report,
) -> Pipeline:
    tensors = tensors_of(model, step, options)
    model, step = tensors.program(model, step)
    device_type = options.check(model)
    meeting, world = None, world_size() or 1
    if world > 1 and not options.simulated:
        if not tensors.divided:
            replica_here(options.plan, options.mesh)  # refuses a mesh for other ranks before this one waits for them
        meeting = Meeting(options.run.timeout_s)
    try:
        return _build_checked(model, step, batch, options, virtual, report, device_type, meeting, tensors)
    except BaseException as failure:
        if meeting is not None:
            if not isinstance(failure, PanpipeError) and not meeting.watch.reported:
                meeting.watch.report(failure)
            meeting.watch.stop(failure)
        raise


def _build_checked(
    model: nn.Module,
    step: StepFunction,
    batch: Any,
    options: PipelineOptions,
    virtual: VirtualDevices | None,
    report: Report,
    device_type: str,
    meeting: Meeting | None,
    tensors: RankTensors,
) -> Pipeline:
    # Whatever can be checked without the step is checked before this: what follows takes time.
    report("capturing the step")
    example = Example.capture(
        model, step, batch, options.microbatches, options.batch_dims, device_type, not tensors.divided, options.dynamic
    )
    if (rank_of_job() or (0, 1))[0] == 0:
        warn_if_cut_changes_loss(model, step, batch, example.shape.dims, options.microbatches, example.trace)
    source = weights_from(options.run.weights, model, options.training.seed)
    source.check(example.read_tensors)
    on_meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    keep_freed_memory(*([SMALL] if on_meta else []))
    plan = options.plan
    if plan is None and virtual is not None:
        plan = virtual.planned(example.operators, report)
    team = _team(options, plan, device_type, compute_device([*model.parameters(), *model.buffers()]), meeting, tensors)
    try:
        builder = _Builder(options, example, team, virtual, report)
        tensors.check_mesh(options.mesh, team.mesh)
        tensors.check([example])
        initial = builder.check_ranks(source)
        with communicating(OneRank()):  # profiles time the operators of one rank; steps communicate with the others
            found = _automatic(builder) if plan is None else CachedPlans([plan])
            start = time.perf_counter()
            session = builder.session(found.plans)
        session.trainer.state.steps = options.run.first_step
        session.load(source, initial)
        if virtual is None and not tensors.divided:
            session.replanner = builder.replanner()
        if not _compare(builder, session, found, time.perf_counter() - start) and session.replanner is not None:
            session.replanner.forget_programs()
        if options.run.replan is not None:
            session.replan_automatically(found.fastest)
        return Pipeline(session)
    except BaseException as failure:
        _end(team, failure)
        raise


def _team(
    options: PipelineOptions,
    plan: Plan | None,
    device_type: str,
    on: torch.device,
    meeting: Meeting | None,
    tensors: RankTensors,
) -> Team:
    """The devices, before ranks have compared their arguments.

    Args:
        plan: the plan of the pipeline; None if it is not known yet.
        device_type: of the devices: ``"cpu"`` or ``"cuda"``.
        meeting: of the ranks; None if this process is no rank.
    """
    mesh, devices = None if tensors.divided else mesh_for(plan, options.mesh), options.devices
    if mesh is None and devices.named is not None and world_size() is None:
        mesh = Mesh(len(devices.named))
    if device_type == "cuda" and (rank := rank_of_job()) is not None:
        torch.cuda.set_device(device_of_rank(devices.named, *rank) if devices.given else on)
    if options.simulated:
        return virtual_team(mesh)
    return make_team(mesh, options.backend, device_type, devices.share, options.run.timeout_s, meeting, tensors)


class _Builder:
    """Builds pipelines of a captured step, for any plan."""

    def __init__(
        self, options: PipelineOptions, example: Example, team: Team, virtual: VirtualDevices | None, report: Report
    ) -> None:
        self.options, self.example, self.team, self.report = options, example, team, report
        self._virtual = virtual
        self.earlier: EarlierPlans | None = None
        self.planned: Planning | None = None
        lines = progress_lines(options.run.progress, team.first)
        self.programs = ProgramOptions(graphs=options.run.cuda_graphs, report=lines)

    def check_ranks(self, source: Weights) -> InitialWeights:
        """Refuse ranks with different arguments, compare their weights, and place the devices.

        All ranks call this together.
        """
        options, example = self.options, self.example
        named, share, compiling = options.devices.named, options.devices.share, options.run.compiler
        given = {
            "microbatches": options.microbatches,
            **options.training.settings,
            "first_step": options.run.first_step,
            "devices": named,
            "share_devices": share,
            "compile": compiling and compiling.name,
            "cuda_graphs": options.run.cuda_graphs,
            "microbatches of": example.shape,
            **model_in_words(example.model, example.operators),
            **describe_update(options.training.optimizer, options.training.scheduler, example.model.named_parameters()),
        }
        check_same(self.team, given)
        check_same_step(self.team, example.operators)
        initial = compare_initial_weights(self.team, example.model, source)
        if initial.warning is not None:
            self.report(initial.warning)
        if self._virtual is None:
            on = compute_device([*example.model.parameters(), *example.model.buffers()])
            self.team.where = assign_devices(self.team, named, on, share, options.devices.given)
        if compiling is not None:
            self.programs = evolve(self.programs, compiler=StageCompiler(compiling.with_threads(self.team.threads)))
        return initial

    def ready(self, plan: Plan) -> Plan:
        """A plan as the team's devices run it."""
        options, plan = self.options, self.team.tensors.planned(plan, self.team.mesh)
        if options.training.needs_all_stages:
            plan = predicted_again(plan, synchronised(plan), options.planning.oracle)
        _check_plan(plan, self.example.operators, self.team, anywhere=options.simulated)
        return plan

    def session(self, plans: Sequence[Plan]) -> Session:
        """Training by the first of some plans, without values yet; programs are compiled for all of them."""
        options = self.options
        first, *others = [self.ready(plan) for plan in plans]
        clock = None if self._virtual is None else self._virtual.clock(first, self.example.operators)
        self.programs = evolve(self.programs, plans=tuple(o for o in others if arrangement(o) == arrangement(first)))
        trainer = Trainer(
            self.example, first, self.team, options.training, self.programs, clock, options.planning.memory.tier,
            options.run.monitors,
        )  # fmt: skip
        return Session(trainer)

    def replanner(self) -> Replanner:
        """What plans again for a pipeline of the captured step."""
        example, options = self.example, self.options
        reads = Guards(example.model, example.step).key
        return Replanner(example, options.planning, self.programs, reads)

    def planning(self) -> Planning:
        """The request of an automatic plan."""
        options = self.options
        return Planning(
            self.example,
            options.microbatches,
            self.team,
            options.planning,
            options.training.optimizer,
            self.programs,
            self.report,
        )

    def earlier_plans(self, planning: Planning) -> EarlierPlans:
        """The cached plans of the same request."""
        options = self.options
        others = {
            "compile": options.run.compiler and options.run.compiler.name,
            "update": options.training.parts,
            "devices": options.devices.named,
            **({"cuda_graphs": True} if options.run.cuda_graphs else {}),
        }
        return EarlierPlans(planning, others)


def _automatic(builder: _Builder) -> CachedPlans:
    """The candidates of an automatic plan, the first one first; or what an earlier run found."""
    planning = builder.planned = builder.planning()
    earlier = builder.earlier = builder.earlier_plans(planning)
    found = earlier.find()
    if found is not None:
        return found
    found = CachedPlans(planning.candidates())
    release_unused(planning.team.where.values())
    earlier.keep(found)
    plan = found.plans[0]
    others = "" if len(found.plans) == 1 else f"; first steps compare it with {counted(len(found.plans) - 1, 'plan')}"
    planning.report(
        f"planned: {plan.schedule}, {plan_size(plan)}, predicted step {plan.predicted.step_s * 1e3:.4g} ms{others}"
    )
    return found


def _compare(builder: _Builder, session: Session, found: CachedPlans, move_s: float) -> bool:
    """Begin the contest of several plans, if the user wants one. Returns whether it begins.

    Args:
        move_s: seconds in which this rank built the pipeline: a move of stages takes about as long.
    """
    options, earlier, planned = builder.options, builder.earlier, builder.planned
    if (
        earlier is None
        or planned is None
        or len(found.plans) == 1
        or not options.planning.rounds
        or options.run.cuda_graphs
    ):
        return False
    order = preference([family.name for family in options.planning.families])
    plans = [session.trainer.plan, *map(builder.ready, found.plans[1:])]
    longest_s = max(builder.team.exchange().gather(move_s)) if options.planning.contest is True else None
    contest = Contest(plans, order, longest_s, options.planning.rounds)

    def rivals(leader: Plan) -> list[Plan]:
        found = planned.rivals(leader, [each.plan for each in contest.candidates])
        return [builder.ready(plan) for plan in found]

    session.begin_contest(
        contest,
        options.planning.oracle,
        lambda won: earlier.keep(CachedPlans([won.plan], won.fastest)),
        planned.fitted,
        None if options.run.compiler is not None else rivals,
    )
    return True


def _end(team: Team, failure: BaseException) -> None:
    """Close the team of a pipeline that cannot be built, and report a failure of this rank alone to the others."""
    if not isinstance(failure, PanpipeError):
        team.fail(failure)
    team.close(failure)


def _check_plan(plan: Plan, operators: Operators, team: Team, anywhere: bool) -> None:
    """Refuse a plan that is not valid, not for this model, or different on another rank.

    Threads refuse a plan that does not use the first devices of its cluster in order, unless ``anywhere`` is True.
    """
    hashes = team.everywhere(lambda _: plan.hash)
    other = next((number for number, found in enumerate(hashes) if found != hashes[0]), None)
    if other is not None:
        raise RequestError(
            f"rank {team.rank(other)} has plan {hashes[other][:12]} and rank {team.rank(0)} has {hashes[0][:12]}: "
            "every rank must run the same plan; give all of them the same file"
        )
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


@contextmanager
def random_states_kept() -> Iterator[None]:
    """A context at whose end the generators of torch, numpy and Python are as they were at its start.

    Profiles draw random numbers, and ranks profile different stages: ranks whose generators differ afterwards would
    draw different batches.
    """
    python, array = random.getstate(), numpy.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(array)
