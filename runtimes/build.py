"""From a user's step to a pipeline that is ready to train: team, capture, plan, handshake."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from torch import nn

from ..backends.kind import BackendKind
from ..core.capture.batch.batch_dims import AUTO
from ..core.capture.batch.find_batch_dims import find_batch_dims
from ..core.capture.export.operators import Operators, operators_of
from ..core.capture.export.step import capture_step
from ..core.capture.regions.breaks import StepFunction
from ..core.cluster.cluster import Cluster
from ..core.cluster.mesh import Mesh
from ..core.errors import PanpipeError, RequestError
from ..core.plan.derive import Recompute, synchronised
from ..core.plan.plan import Plan
from ..core.plan.validation.validate import validate
from ..core.plan.wording import plan_size
from ..core.schedules.problem import ScheduleFamily
from ..core.search import Oracle
from ..core.search.compiling import compile_ahead
from ..core.search.problem.score import with_costs
from .batch.microbatches import split_batch
from .devices.compute import compute_device
from .devices.devices import Names, of_rank, parse_devices, place
from .devices.heap import SMALL, keep_freed_memory
from .engine.clocked import VirtualDevices
from .launch.agreement import check_same, model_in_words
from .launch.launch import MeshWish, make_team, mesh_for, rank_of_job, virtual_team, world_size
from .launch.progress import Report, silent
from .launch.team import Team
from .optimizer.optimizers import OptimizerFactory
from .optimizer.training import Training
from .pipeline import Pipeline
from .planning.automatic import Planning
from .planning.budget import Budget
from .planning.earlier_plan import EarlierPlans
from .programs.compiled import Programs
from .programs.stage_compiler import CompilerChoice, StageCompiler
from .rehearsal import best_rehearsed
from .training.initial_weights import check_same_weights
from .weights import ModuleInit, weights_from


def build_pipeline(
    model: nn.Module, step: StepFunction, example_batch: Any, *, optimizer: OptimizerFactory | None,
    microbatches: int, plan: Plan | None, mesh: MeshWish, backend: str | BackendKind | None,
    cluster: Cluster | None, families: Sequence[ScheduleFamily], anneal: bool, oracle: Oracle, cut_oracle: Oracle,
    max_chunks: int, seed: int, max_shapes: int, weights: str | Path | ModuleInit | None = None,
    recompute: Recompute | None = None, virtual: VirtualDevices | None = None, devices: Names | None = None,
    share_devices: bool = False, training: Training | None = None, compile: CompilerChoice | None = None,
    plan_seconds: float | None = None, plan_cache: bool = False, report: Report = silent, batch_dims: Any = AUTO,
) -> Pipeline:  # fmt: skip
    """Build a pipeline; see ``panpipe.pipeline`` for what a user gives.

    Args:
        mesh: pipeline × data; None for one pipeline over the ranks there are, or two threads.
        families: the schedules an automatic plan chooses among.
        anneal: whether its orders may depart from theirs.
        oracle, cut_oracle: score plans (see :class:`Planning`).
        max_shapes: for how many shapes of microbatches programs are kept.
        weights: where values come from that the model does not hold.
        recompute: the stages that do; None for those of the plan.
        training: what happens in an update beside the optimizers' steps.
        virtual: devices that are not there, all of them in this process; None for real ones.
        devices: the torch device of each; None for where the model is, or with threads on GPUs one GPU each.
        share_devices: whether several may be on one.
        compile: how what stages are made of is compiled; None where operators run one by one.
        plan_seconds: the most that automatic planning takes after the capture (see :meth:`Budget.of`).
        plan_cache: whether automatic plans are kept on disk.
        report: called with what is going on.
        batch_dims: where the samples of a batch are; what is not given is found by tracing.

    Raises:
        RequestError: something asked for is wrong.
        InfeasibleError: no plan fits in memory.
    """
    training = training or Training()
    if optimizer is not None and not callable(optimizer):
        raise RequestError(f"optimizer is {optimizer!r}: give a class such as torch.optim.AdamW, or a function")
    training.check(model, optimizer is not None)
    on = compute_device([*model.parameters(), *model.buffers()])
    named = None if devices is None else parse_devices(devices)
    kind = on.type if devices is None else "cuda" if named is None else named[0].type
    if virtual is not None and kind != "cpu":
        raise RequestError(f"target 'simulator' runs stages on the host and the model would be on {kind}: use cpu")
    if compile is not None:
        compile.check(kind)
    # What is asked for is right as far as the arguments alone show: from here on it takes time.
    report("capturing the step")
    dims = find_batch_dims(model, step, example_batch, given=batch_dims, microbatches=microbatches)
    largest = split_batch(example_batch, microbatches, dims)[0]
    operators = operators_of(capture_step(model, step, largest.batch, device=kind))
    source = weights_from(weights, model, seed)
    source.check(read_tensors(operators))
    on_meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    keep_freed_memory(*([SMALL] if on_meta else []))
    given = plan if plan is not None or virtual is None else virtual.planned(operators, microbatches, report)
    wanted = mesh_for(given, mesh)
    if wanted is None and named is not None and world_size() is None:
        wanted = Mesh(len(named))
    if kind == "cuda" and (rank := rank_of_job()) is not None:
        torch.cuda.set_device(on if devices is None else of_rank(named, *rank))
    team = make_team(wanted, backend, kind, share_devices) if virtual is None else virtual_team(wanted, backend)
    try:
        check_same(team, {
            "microbatches": microbatches, "seed": seed, "an optimizer": optimizer is not None, "devices": named,
            "share_devices": share_devices, "compile": compile and compile.name, **training.settings,
            "microbatches of": largest.shape, **model_in_words(model, operators),
        })  # fmt: skip
        check_same_weights(team, model, source)
        if virtual is None:
            team.where = place(team, named, on, share_devices, devices is not None)
        compiler = None if compile is None else StageCompiler(compile.with_threads(team.threads))
        programs: Programs = {}

        def ready(plan: Plan) -> Pipeline:
            if training.needs_all_stages:
                plan = _predicted_again(plan, synchronised(plan), oracle)
            _check_plan(plan, operators, team, anywhere=virtual is not None)
            return Pipeline(model, step, team, plan, operators, largest.shape, optimizer, seed, max_shapes,
                            None if virtual is None else virtual.clock(plan, operators), training, compiler,
                            programs)  # fmt: skip

        if given is not None:
            pipe = ready(given)
        else:
            planning = Planning(
                operators, dict(model.named_parameters()), dict(model.named_buffers()), largest, microbatches, team,
                families=families, anneal=anneal, oracle=oracle, cut_oracle=cut_oracle, optimizer=optimizer,
                max_chunks=max_chunks, cluster=cluster, report=report, recompute=recompute,
                compiler=compiler, budget=Budget.of(team, plan_seconds), programs=programs,
            )  # fmt: skip
            options = {"compile": compile and compile.name, "update": training.parts, "devices": named}
            pipe = _automatic(planning, ready, example_batch, EarlierPlans(planning, options, plan_cache))
        pipe.load(source)
        return pipe
    except BaseException as failure:
        _end(team, failure)
        raise


def _automatic(
    planning: Planning, ready: Callable[[Plan], Pipeline], example_batch: Any, earlier: EarlierPlans
) -> Pipeline:
    """The pipeline of the plan that an earlier run made, or of one that is made now."""
    found = earlier.find()
    if found is not None:
        return ready(found)
    if planning.team.decide(lambda: compile_ahead(planning.report)):  # by one rank, for all of a machine
        planning.budget.restart()
    pipe = best_rehearsed(planning, ready, example_batch)
    earlier.keep(pipe.plan)
    cut, step = planning.budget.cut, pipe.plan.prediction
    if cut:
        planning.report(f"planned within {planning.budget.seconds:.3g} s (plan_seconds=), without {', '.join(cut)}")
    predicted = "" if step is None else f", predicted step {step.step_s * 1e3:.4g} ms"
    planning.report(f"planned: {pipe.plan.schedule}, {plan_size(pipe.plan)}{predicted}")
    return pipe


def _end(team: Team, failure: BaseException) -> None:
    """Close the team of a pipeline that cannot be built; the others learn what failed on this rank alone."""
    if not isinstance(failure, PanpipeError):
        team.fail(failure)
    team.close()


def _predicted_again(plan: Plan, changed: Plan, oracle: Oracle) -> Plan:
    """The changed plan, with the prediction that the plan had made again for it."""
    prediction = plan.prediction
    if changed is plan or prediction is None:
        return changed
    return with_costs(evolve(changed, prediction=prediction), prediction.costs, oracle)


def read_tensors(operators: Operators) -> list[str]:
    """Names of the parameters and buffers that a captured step reads, each once."""
    buffers = [
        operators.step.buffers[n.name]
        for n in operators.step.graph.nodes
        if n.name in operators.step.buffers and n.users
    ]
    return list(dict.fromkeys([*operators.graph.parameters, *buffers]))


def _check_plan(plan: Plan, operators: Operators, team: Team, anywhere: bool) -> None:
    """Refuse a plan that is not for this model, not sound, not the same everywhere, or, unless it may stand
    ``anywhere``, not on the first devices."""
    hashes = team.everywhere(lambda _: plan.hash)
    other = next((number for number, found in enumerate(hashes) if found != hashes[0]), None)
    if other is not None:
        raise RequestError(
            f"rank {team.rank(other)} has plan {hashes[other][:12]} and rank {team.rank(0)} has {hashes[0][:12]}: "
            "every rank runs the same plan; give all of them the same file"
        )
    if plan.graph_hash != operators.graph.hash:
        raise RequestError(
            f"the plan was made for '{plan.model}' (graph {plan.graph_hash[:12]}) and the captured step is "
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
