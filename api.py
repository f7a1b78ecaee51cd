"""The front door: what ``panpipe.pipeline`` does, with the simulator as the planner's oracle."""

from pathlib import Path
from typing import Any

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh

from .backends.kind import BackendKind
from .core.capture.batch.batch_dims import AUTO
from .core.capture.regions.breaks import StepFunction
from .core.cluster.catalog import find_cluster
from .core.cluster.cluster import Cluster
from .core.cluster.mesh import Mesh, MeshShape, parse_mesh
from .core.errors import RequestError
from .core.plan.derive import Recompute, check_agrees
from .core.plan.plan import Plan, read_plan
from .core.schedules.registry import families, find_family
from .core.search import longest_path
from .runtimes.batch.shapes import MAX_SHAPES
from .runtimes.build import build_pipeline
from .runtimes.devices.devices import Names
from .runtimes.launch.launch import mesh_for, mesh_in_simulator, rank_of_job
from .runtimes.launch.progress import Progress, check_progress, shown
from .runtimes.optimizer.optimizers import OptimizerFactory, SchedulerFactory
from .runtimes.optimizer.training import Training
from .runtimes.pipeline import Pipeline
from .runtimes.planning.budget import check_seconds
from .runtimes.programs.stage_compiler import Compile, CompilerChoice
from .runtimes.weights import ModuleInit
from .simulators.oracle import simulated
from .virtual import SimulatedDevices

TARGETS = ("devices", "simulator")
MICROBATCHES = 8
"""Of an automatic plan, unless a number is given."""


def pipeline(
    model: nn.Module,
    step: StepFunction,
    example_batch: Any,
    *,
    optimizer: OptimizerFactory | None = None,
    microbatches: int | None = None,
    plan: Plan | str | Path = "auto",
    schedule: str = "auto",
    mesh: Mesh | DeviceMesh | str | int | None = None,
    backend: str | BackendKind | None = None,
    target: str = "devices",
    cluster: Cluster | str | Path | None = None,
    max_chunks: int = 2,
    seed: int = 0,
    max_shapes: int = MAX_SHAPES,
    weights: str | Path | ModuleInit | None = None,
    recompute: Recompute | None = None,
    devices: Names | None = None,
    share_devices: bool = False,
    clip_norm: float | None = None,
    scaler: GradScaler | None = None,
    compile: str | Compile | None = None,
    scheduler: SchedulerFactory | None = None,
    plan_seconds: float | None = None,
    plan_cache: bool = True,
    batch_dims: Any = AUTO,
    progress: bool | Progress = True,
) -> Pipeline:
    """Make a model ready to train as a pipeline.

    Under ``torchrun`` every rank calls this with the same arguments; otherwise devices are threads of this process.

    Args:
        model: any module; it is not changed, but that parameters which other processes own go to the meta device. All
            of it, or some, may be on meta to begin with: construct it under ``panpipe.empty_weights()``, and each
            process takes memory for its own stages alone.
        step: ``step(model, batch) -> loss``; or ``(loss, weight)``, for means over something else than samples;
            either may be followed by a dict of metrics; or an object or a dict that has a ``loss``, such as a model's
            output of transformers, whose other scalars are metrics.
        example_batch: a whole batch of one replica; every rank of it passes the same one: any nesting of tensors in
            dicts, lists, tuples, named tuples, dataclasses and mappings, such as the BatchEncoding of transformers; or
            a list of samples, which the step collates.
        batch_dims: which dimension of each tensor of a batch holds the samples: a prefix of the batch's nesting, as of
            ``in_dims`` of ``torch.vmap``, with None for tensors that all microbatches share, and ``"samples"`` for a
            list of samples: ``{"x": 1, "y": 0, "mask": None}``, or ``1`` for all tensors. What is not given is found by
            tracing the step with another number of samples; where that leaves a doubt, an error asks for it.
        optimizer: called for each stage with the (name, parameter) pairs of those of its parameters that are not
            frozen, such as ``torch.optim.AdamW``; None leaves the gradients in the parameters. A function may form
            groups by name, of parameters, the same ones for every stage: a group is empty where no parameter of the
            stage belongs to it. It may return None where it takes none. It is also called with stand-ins, to see what
            the optimizer keeps. Each stage has an optimizer of its own, so those that compute the loss again, or that
            change a parameter otherwise when others are beside it, are refused.
        microbatches: how many a batch is cut into; those of a plan that is given, else 8.
        plan: ``"auto"``, a Plan, or the path of one. Where ``microbatches``, ``schedule``, ``mesh`` or ``recompute``
            are given as well and are not those of the plan, it is refused.
        schedule: name of the schedule of an automatic plan, or ``"auto"``.
        mesh: devices along the pipeline and, with ranks, replicas of it: ``"pp=4"`` or 4, ``"pp=4,dp=2"``, a Mesh, or
            torch's ``DeviceMesh`` with dimensions named ``pp`` and ``dp``. The dimension written last has neighbouring
            ranks; the other one runs across nodes. By default one pipeline over the ranks there are, or two threads.
            Over replicas a step is that of one process on their batches one after another, in the order of replicas;
            microbatch m of replica r has the random numbers of number r × ``microbatches`` + m. Buffers that a
            forward writes, such as BatchNorm's statistics, are those of the first replica, as in
            DistributedDataParallel.
        target: ``"devices"``, which are there; or ``"simulator"``: the plan's own stage programs run on tensors of the
            host, one process in place of all devices of ``cluster``, when the simulator's clock comes to them. Losses,
            gradients and updates are those of devices; ``trace`` has the times of the cost model, and the saved tensors
            that were alive on each device.
        backend: the transport, by name (``panpipe backends`` lists them) or as a BackendKind; by default gloo between
            ranks and memcpy between threads.
        cluster: the machine, as a Cluster, a file, or a name such as ``8xA100-40GB``; measured by default.
        max_chunks: the most stages that a device may hold in an automatic plan.
        seed: of all random numbers.
        max_shapes: for how many shapes of microbatches programs are kept; the step is captured anew for another one.
        weights: what gives values to parameters and buffers on meta. None: each module's ``reset_parameters()``. A
            function ``init(module)``, called as FSDP calls ``param_init_fn``, for each module that owns some itself,
            and for no container of such; for a model of transformers it is ``model._init_weights``. Its random numbers
            depend on the seed and the module's name, never on the plan. The path of a ``.safetensors`` file, of a
            ``model.safetensors.index.json``, or of a folder with either: read for everything that the step reads,
            on meta or not, one tensor at a time.
        recompute: ``"none"``, ``"all"``, or the numbers of the stages that run their forward a second time, before
            the backward, instead of holding its saved tensors. By default those of the plan, or what the planner
            chooses.
        devices: the torch device of every device of the pipeline, ``"cuda:0,cuda:1"``, or ``"cuda"`` for one GPU
            each; of every rank under ``torchrun``, on the rank's own host. The model's tensors are moved there, as
            ``Module.to`` moves them. By default everything is where the model is; threads on GPUs take one each. Random
            numbers of a GPU are not those of a CPU: there, a pipeline equals one process on the GPU. Has not run on a
            GPU yet.
        share_devices: whether one torch device may be named for several devices of the pipeline, which serves to test
            the path that GPUs take on one of them.
        clip_norm: the most that the global 2-norm of all gradients may be, as of
            ``torch.nn.utils.clip_grad_norm_``; ``math.inf`` measures it alone. ``grad_norm`` of the pipeline has it.
        scaler: scales losses for a step in float16: a ``torch.amp.GradScaler``, such as ``GradScaler("cpu")``; on every
            rank one in the same state. ``step`` does what ``scaler.scale(loss).backward()``, ``scaler.unscale_``,
            clipping, ``scaler.step(optimizer)`` and ``scaler.update()`` do in one process: where a gradient of any
            stage is not finite, no stage steps, ``skipped`` of the pipeline is True, and the scale goes down. The
            scaler's own state counts all of that: ``get_scale()``, ``state_dict()`` and ``load_state_dict()`` are as
            ever. With ``update=False`` the scale stays until the update. What ``step`` returns is not scaled.
            Parameters are not in float16; the step computes in it under ``torch.autocast``.
        compile: compiles what stages are made of: ``"inductor"``, another backend of ``torch.compile`` by name, or a
            function ``(graph, example_inputs) -> function``. What lies between matrix products, convolutions,
            attention, random draws and Python that stays Python is compiled, before the first step; equal groups of
            operators once, of whatever layer or stage. Profiles and rehearsals time what is compiled. Numbers are no
            longer bit-equal to the captured graph's: a fused sum rounds elsewhere, and in 16 bits it rounds less often.
            What a backend cannot compile runs as it is, and a line says so. The first Inductor build of a machine
            takes half a minute, each further group a second or two; Inductor keeps them on disk.
        scheduler: called with each stage's optimizer, such as ``lambda o:
            torch.optim.lr_scheduler.CosineAnnealingLR(o, 1000)``, or one that returns a SequentialLR; stepped once
            behind every update, so it counts updates, and neither batches whose gradients are kept nor epochs. Groups
            must be the same in every stage. ``learning_rates`` of the pipeline tells; ``optimizers`` are for schedulers
            that you step, by epochs or by a metric.
        plan_seconds: the seconds that automatic planning may take after the capture: it begins nothing that would take
            longer, and a line reports what was left out, such as comparing 1F1B with a schedule that is predicted to be
            faster. None is 10 s, or eight steps of training where these take longer. With more, as much is searched and
            measured as the model needs, and no more.
        plan_cache: whether an automatic plan is kept on disk (in ``$PANPIPE_CACHE``, by default
            ``~/.cache/panpipe``) and taken from there the next time: for the same model, shapes, arguments, machine and
            versions. False plans anew and keeps nothing.
        progress: shows on standard error, on rank 0, what planning is doing; False shows nothing, and a function is
            called as ``progress(phase, done, total)``, with 0 and 0 where a phase does not count its parts.

    Returns:
        The pipeline; its ``step(batch)`` trains.

    Raises:
        RequestError: something asked for is wrong; the message names value, rule and fix.
        InfeasibleError: no plan fits in memory.

    Example:
        >>> pipe = panpipe.pipeline(model, step, batch, optimizer=torch.optim.AdamW)  # doctest: +SKIP
        >>> loss = pipe.step(batch)  # doctest: +SKIP
    """
    if target not in TARGETS:
        raise RequestError(f"there is no target '{target}': known are {', '.join(TARGETS)}")
    chosen = list(families().values()) if schedule == "auto" else [find_family(schedule)]
    if microbatches is not None and microbatches < 1:
        raise RequestError(f"{microbatches} microbatches: a step needs at least 1")
    check_seconds(plan_seconds)
    check_progress(progress)
    if not isinstance(plan_cache, bool):
        raise RequestError(f"plan_cache is {plan_cache!r}: give True or False; PANPIPE_CACHE names the folder")
    wanted = _mesh(mesh)
    given = _given(plan)
    if given is not None:
        check_agrees(given, microbatches, schedule, recompute)
        mesh_for(given, wanted)
    training = Training(clip_norm, scaler, scheduler)
    compiling = CompilerChoice.of(compile)
    if compiling is not None and target == "simulator":
        raise RequestError(
            f"target 'simulator' takes its times from a cost model and compile is {compile!r}: leave compile out"
        )
    machine = find_cluster(cluster) if isinstance(cluster, str | Path) else cluster
    virtual = None
    if target == "simulator":
        virtual = SimulatedDevices(
            machine, chosen, schedule == "auto", _virtual_devices(wanted), max_chunks, optimizer, recompute
        )
    with shown(progress, (rank_of_job() or (0, 1))[0] == 0) as report:
        return build_pipeline(
            model,
            step,
            example_batch,
            optimizer=optimizer,
            microbatches=given.microbatches if given is not None else microbatches or MICROBATCHES,
            plan=given,
            mesh=wanted,
            backend=backend,
            cluster=machine,
            families=chosen,
            anneal=schedule == "auto",
            oracle=simulated,
            cut_oracle=longest_path,
            max_chunks=max_chunks,
            seed=seed,
            max_shapes=max_shapes,
            weights=weights,
            recompute=recompute,
            virtual=virtual,
            devices=devices,
            share_devices=share_devices,
            training=training,
            compile=compiling,
            plan_seconds=plan_seconds,
            plan_cache=plan_cache,
            batch_dims=batch_dims,
            report=report,
        )


def _given(plan: Plan | str | Path) -> Plan | None:
    """The plan that a user gives; None for an automatic one."""
    if isinstance(plan, Plan):
        return plan
    if not isinstance(plan, str | Path):
        raise RequestError(f"plan is {plan!r}: give 'auto', a Plan, or the path of a plan file")
    return None if plan == "auto" else read_plan(plan)


def _mesh(mesh: Mesh | DeviceMesh | str | int | None) -> Mesh | MeshShape | DeviceMesh | None:
    """A mesh as far as it is known without knowing how many devices there are."""
    if isinstance(mesh, Mesh):
        mesh.check()
    return parse_mesh(f"pp={mesh}" if isinstance(mesh, int) else mesh) if isinstance(mesh, int | str) else mesh


def _virtual_devices(mesh: Mesh | MeshShape | DeviceMesh | None) -> int | None:
    """Devices along the pipeline of an automatic plan for devices that are simulated."""
    return None if mesh is None else mesh_in_simulator(mesh).pipeline
