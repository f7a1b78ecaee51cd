"""``panpipe.pipeline``, with the simulator as the planner's oracle."""

import inspect
from pathlib import Path
from typing import Any

from attrs import evolve, fields
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from .backends.kind import BackendKind
from .core.capture.batch.batch_dims import AUTO
from .core.capture.regions.breaks import StepFunction
from .core.cluster.cluster import Cluster
from .core.cluster.mesh import Mesh
from .core.errors import RequestError, refuse_other_kinds, without_own_frames
from .core.plan.plan import Plan
from .core.search import longest_path
from .core.wording import nearest
from .runtimes.build import build_pipeline, refuse_arguments, unwrapped
from .runtimes.devices.devices import Names
from .runtimes.launch.launch import rank_of_job
from .runtimes.launch.progress import show_progress
from .runtimes.options import SIMULATOR, PipelineOptions, given_plan
from .runtimes.pipeline import Pipeline
from .runtimes.settings import Auto, Memory, PlanningOptions, Run, Update
from .runtimes.update.optimizers import GivenOptimizer, OptimizerFactory
from .runtimes.update.training import Training
from .runtimes.watch.process import print_uncaught_in_a_line
from .simulators.oracle import simulated


@without_own_frames
def pipeline(
    model: nn.Module,
    step: StepFunction,
    example_batch: Any,
    *,
    optimizer: OptimizerFactory | Optimizer | None = None,
    microbatches: int | None = None,
    plan: Plan | Auto | str | Path = "auto",
    mesh: Mesh | DeviceMesh | str | int | None = None,
    backend: str | BackendKind | None = None,
    devices: Names | Cluster | Path | None = None,
    batch_dims: Any = AUTO,
    dynamic: Any = None,
    memory: Memory | None = None,
    update: Update | None = None,
    run: Run | None = None,
    **moved: Any,
) -> Pipeline:
    """Make a model ready to train as a pipeline.

    Under ``torchrun`` every rank calls this with the same arguments; otherwise devices are threads of this process.

    Args:
        model: any module. It is not changed, except that parameters of other processes move to the meta device. It may
            be on meta, completely or in part: constructed under ``panpipe.empty_weights()``, each process allocates
            memory only for its own stages.
        step: ``step(model, batch) -> loss``; or ``(loss, weight)``, for means over something else than samples;
            either may be followed by a dict of metrics; or an object or a dict with a ``loss``, such as a model output
            of transformers, whose other scalars are metrics.
        example_batch: a whole batch of one replica, the same on all its ranks: any nesting of tensors in dicts, lists,
            tuples, named tuples, dataclasses and mappings, such as the BatchEncoding of transformers; or a list of
            samples, which the step collates.
        optimizer: called for each stage with the (name, parameter) pairs of its parameters that are not frozen, such as
            ``torch.optim.AdamW``; None leaves the gradients in the parameters. A function may form groups of parameters
            by name, the same ones for every stage; a group is empty if no parameter of the stage belongs to it. It may
            return None if it takes none. It is also called with other tensors, to measure the optimizer's state. Each
            stage has its own optimizer, so optimizers that compute the loss again, or whose update of a parameter
            depends on other parameters, are refused. An optimizer over the model, as plain PyTorch has it, is replaced
            by such a function with its class, groups and options; schedulers that write to its groups work as usual.
        microbatches: the number of microbatches that a batch is cut into; by default that of the given plan, otherwise
            8.
        plan: ``"auto"``; the name of a schedule, for an automatic plan with it; a ``panpipe.Auto``, which says how an
            automatic plan is found; or a Plan, or the path of one. If ``microbatches``, ``mesh``, ``recompute``,
            ``offload`` or ``shard`` are also given and differ from the plan's, it is refused.
        mesh: devices along the pipeline and, with ranks, replicas of it: ``"pp=4"`` or 4, ``"pp=4,dp=2"``, a Mesh, or
            torch's ``DeviceMesh`` with dimensions named ``pp`` and ``dp``. The dimension written last has neighbouring
            ranks; the other one crosses nodes. By default one pipeline over all ranks, or two threads.
            With replicas a step equals that of one process on their batches one after another, in the order of
            replicas; microbatch m of replica r has the random numbers of number r × ``microbatches`` + m. Buffers that
            a forward writes, such as BatchNorm's statistics, are those of the first replica, as in
            DistributedDataParallel. A model whose parameters are DTensors after torch's ``parallelize_module`` has
            ``"pp=2,tp=2"``: ranks of the same stage hold parts of its parameters, and all get the same batch. Their
            mesh is that of the DTensors. See the page Planning of the docs for what is supported.
        backend: the transport, by name (``panpipe backends`` lists them) or as a BackendKind; by default gloo between
            ranks and memcpy between threads. Or ``"simulator"``: threads of one process run the stage programs of all
            ``devices`` on CPU tensors. Losses, gradients and updates are those of real devices; ``trace_step`` has the
            times and the memory of the cost model, monitors the measured peak of saved tensors.
        devices: the torch device of every device of the pipeline, ``"cuda:0,cuda:1"``, or ``"cuda"`` for one GPU
            each; under ``torchrun`` of every rank, on the rank's own host. The model's tensors are moved there, as by
            ``Module.to``. By default the model's device; threads on GPUs use one GPU each. Random numbers of a GPU
            differ from those of a CPU: a pipeline on GPUs equals one process on a GPU. For
            ``backend="simulator"`` a cluster: a Cluster, a file, or a name such as ``8xA100-40GB``; by default that of
            the plan. Has not run on a GPU yet.
        batch_dims: the dimension of each tensor of a batch that holds the samples: a prefix of the batch's nesting, as
            ``in_dims`` of ``torch.vmap``, with None for tensors that all microbatches share, and ``"samples"`` for a
            list of samples: ``{"x": 1, "y": 0, "mask": None}``, or ``1`` for all tensors. Where it is not given, it is
            dimension 0, which tracing the step with another number of samples checks; Python values, and tensors with
            one row in a batch of several samples, are shared. See the section Batches of the page Training of the docs.
        dynamic: the dimensions whose sizes differ between batches, such as lengths of texts; also a prefix of the
            batch, with a dimension, several, or a dict from dimension to its largest size for each tensor below:
            ``{"input_ids": 1, "images": (2, 3)}``, or ``1`` for all tensors. The step is then captured once for all
            sizes; otherwise a second time, at the second size. With largest sizes, ``{1: 512}``, it is planned for
            these, in time and memory, and a larger batch is refused.
        memory: a limit, recomputation, offload, and what replicas share; see `panpipe.Memory`.
        update: clipping, loss scaling, schedulers, and what happens if a loss is not finite; see `panpipe.Update`.
        run: seed, initial weights, compilation, monitors, progress and time-outs; see `panpipe.Run`.
        moved: nothing: names of earlier releases are refused, with what replaces them.

    Returns:
        The pipeline; its ``step(batch)`` trains.

    Raises:
        RequestError: an argument is wrong; the message names value, rule and fix.
        InfeasibleError: no plan fits in memory.

    Example:
        >>> adamw = lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)  # doctest: +SKIP
        >>> pipe = panpipe.pipeline(model, step, batch, optimizer=adamw)  # doctest: +SKIP
        >>> loss = pipe.step(batch)  # doctest: +SKIP
    """
    if (job := rank_of_job()) is not None:
        print_uncaught_in_a_line(job[0])
    if moved:
        _refuse_moved(moved)
    run = Run() if run is None else run
    memory = Memory() if memory is None else memory
    update = Update() if update is None else update
    for name, group, kind in (("memory", memory, Memory), ("update", update, Update), ("run", run, Run)):
        title = f"panpipe.{kind.__name__}"
        refuse_other_kinds(name, group, kind, f"a {title}, as in {title}({fields(kind)[0].name}=...)")
    own = None
    if isinstance(optimizer, Optimizer):
        refuse_arguments(model, step)
        own = optimizer = GivenOptimizer(optimizer, unwrapped(model))
    given, auto = given_plan(plan)
    machine = devices if isinstance(devices, str | Path | Cluster) and backend == SIMULATOR else None
    if machine is not None:
        auto, devices = evolve(auto, cluster=machine), None
    if isinstance(devices, Path | Cluster):
        raise RequestError(
            "devices is a cluster: give backend='simulator' to train on simulated devices, or "
            "plan=panpipe.Auto(cluster=...) to plan for it"
        )
    options = PipelineOptions(
        training=Training.of(update, optimizer, run.seed),
        planning=PlanningOptions.of(auto, memory, oracle=simulated, cut_oracle=longest_path),
        run=run,
        devices=devices,
        microbatches=microbatches,
        plan=given,
        mesh=mesh,
        backend=backend,
        batch_dims=batch_dims,
        dynamic=dynamic,
    )
    virtual = None
    if options.simulated:
        from .simulator_target import SimulatedDevices  # with the analytic costs, which other pipelines do not need

        virtual = SimulatedDevices(options)
    with show_progress(run.progress, job is None or job[0] == 0) as report:
        pipe = build_pipeline(model, step, example_batch, options, virtual, report)
    if own is not None:
        own.refuse_other_use()
    return pipe


_MOVED = {
    **{
        each.name: f"{argument}=panpipe.{group.__name__}({each.name}=...)"
        for argument, group in (("plan", Auto), ("memory", Memory), ("update", Update), ("run", Run))
        for each in fields(group)
        if each.init
    },
    "schedule": 'plan="1f1b", or another name of a schedule',
    "plan_cache": "plan=panpipe.Auto(cache=...)",
    "plan_seconds": "plan=panpipe.Auto(contest=...)",
    "target": 'backend="simulator", devices="8xA100-40GB"',
    "host_memory": "memory=panpipe.Memory(host=...)",
}
"""Arguments of earlier releases, and what replaces each; for one release."""


def _refuse_moved(given: dict[str, Any]) -> None:
    new = {name: _MOVED[name] for name in given if name in _MOVED}
    if not new:
        name = next(iter(given))
        raise TypeError(
            f"pipeline() has no argument '{name}': {nearest(name, [*inspect.signature(pipeline).parameters][:-1])}"
        )
    instead = "; ".join(f"in place of {name}= give {text}" for name, text in new.items())
    raise RequestError(f"the arguments of panpipe.pipeline are in groups now: {instead}")
