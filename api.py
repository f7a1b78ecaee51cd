"""``panpipe.pipeline``, with the simulator as the planner's oracle."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh

from .backends.kind import BackendKind
from .core.capture.batch.batch_dims import AUTO
from .core.capture.regions.breaks import StepFunction
from .core.cluster.cluster import Cluster
from .core.cluster.mesh import Mesh
from .core.offload.request import OffloadRequest
from .core.plan.derive import Recompute
from .core.plan.plan import Plan
from .core.search import longest_path
from .runtimes.build import build_pipeline
from .runtimes.devices.devices import Names
from .runtimes.launch.launch import rank_of_job
from .runtimes.launch.progress import Progress, show_progress
from .runtimes.monitor.monitors import Monitor
from .runtimes.offload.tier import HOST, OffloadTier
from .runtimes.optimizer.optimizers import OptimizerFactory, SchedulerFactory
from .runtimes.optimizer.training import Training
from .runtimes.options import DeviceOptions, PipelineOptions
from .runtimes.pipeline import Pipeline
from .runtimes.planning.options import PlanningOptions
from .runtimes.programs.compiler_choice import Compile
from .runtimes.weights import ModuleInit
from .simulator_target import SimulatedDevices
from .simulators.oracle import simulated


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
    boundaries: str = "operators",
    seed: int = 0,
    weights: str | Path | ModuleInit | None = None,
    recompute: Recompute | None = None,
    offload: OffloadRequest | None = None,
    offload_to: str | Path = HOST,
    host_memory: int | str | None = None,
    devices: Names | None = None,
    share_devices: bool = False,
    clip_norm: float | None = None,
    scaler: GradScaler | None = None,
    compile: str | Compile | None = None,
    scheduler: SchedulerFactory | None = None,
    contest: bool | int = True,
    plan_cache: bool = True,
    batch_dims: Any = AUTO,
    dynamic: Any = None,
    on_nonfinite: str | None = "warn",
    monitor: Monitor | Sequence[Monitor] | None = None,
    replan: str | None = None,
    shard: str | None = None,
    progress: bool | Progress = True,
    timeout_s: float | None = None,
    cuda_graphs: bool = False,
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
        optimizer: called for each stage with the (name, parameter) pairs of its parameters that are not frozen, such as
            ``torch.optim.AdamW``; None leaves the gradients in the parameters. A function may form groups of parameters
            by name, the same ones for every stage; a group is empty if no parameter of the stage belongs to it. It may
            return None if it takes none. It is also called with other tensors, to measure the optimizer's state. Each
            stage has its own optimizer, so optimizers that compute the loss again, or whose update of a parameter
            depends on other parameters, are refused.
        microbatches: the number of microbatches that a batch is cut into; by default that of the given plan, otherwise
            8.
        plan: ``"auto"``, a Plan, or the path of one. If ``microbatches``, ``schedule``, ``mesh`` or ``recompute`` are
            also given and differ from the plan's, it is refused.
        schedule: name of the schedule of an automatic plan, or ``"auto"``.
        mesh: devices along the pipeline and, with ranks, replicas of it: ``"pp=4"`` or 4, ``"pp=4,dp=2"``, a Mesh, or
            torch's ``DeviceMesh`` with dimensions named ``pp`` and ``dp``. The dimension written last has neighbouring
            ranks; the other one crosses nodes. By default one pipeline over all ranks, or two threads.
            With replicas a step equals that of one process on their batches one after another, in the order of
            replicas; microbatch m of replica r has the random numbers of number r × ``microbatches`` + m. Buffers that
            a forward writes, such as BatchNorm's statistics, are those of the first replica, as in
            DistributedDataParallel. A model whose parameters are DTensors after torch's ``parallelize_module`` has
            ``"pp=2,tp=2"``: ranks of the same stage hold parts of its parameters, and all get the same batch. Their
            mesh is that of the DTensors. See the page Planning of the docs for what is supported.
        target: ``"devices"``, real ones; or ``"simulator"``: one process runs the stage programs of all devices of
            ``cluster`` on CPU tensors, at the times of the simulator. Losses, gradients and updates are those of real
            devices; ``trace`` has the times of the cost model, and the saved tensors that were alive on each device.
        backend: the transport, by name (``panpipe backends`` lists them) or as a BackendKind; by default gloo between
            ranks and memcpy between threads.
        cluster: the machine, as a Cluster, a file, or a name such as ``8xA100-40GB``; measured by default.
        max_chunks: the most stages of a device in an automatic plan.
        boundaries: where a stage of an automatic plan may end: after any of the ``"operators"``; or, with ``"layers"``,
            between layers only, which are the children of a ModuleList or Sequential that repeat.
        seed: of all random numbers.
        weights: the source of values for parameters and buffers on meta. None: each module's ``reset_parameters()``. A
            function ``init(module)``, called as FSDP's ``param_init_fn``, for each module with own parameters or
            buffers; for a model of transformers it is ``model._init_weights``. Its random numbers depend on the seed
            and the module's name, never on the plan. Or the path of a ``.safetensors`` file, of a
            ``model.safetensors.index.json``, or of a folder with either: it sets all tensors that the step reads, on
            meta or not, one tensor at a time.
        recompute: ``"none"``, ``"all"``, or the numbers of the stages that run their forward a second time, before
            the backward, instead of holding its saved tensors. By default as in the plan, or chosen by the planner.
        offload: which saved tensors leave their device between forward and backward: ``"none"``; ``"all"``, as much as
            the links carry without a longer step; ``"auto"``, only if memory is short, what makes the step fastest
            together with ``recompute``; or a dict from stage to the share of its bytes, from 0 to 1. By default as in
            the plan (``memory.offload``); an automatic plan then offloads nothing. See the page Offload of the docs.
        offload_to: where offloaded tensors go: ``"host"``, the host's memory, pinned for a GPU; ``"disk"``, a file in
            the folder for temporary files; or the folder of that file. For devices on the CPU the host's memory is
            their own, and only a file frees memory. The file has no name and ends with the process.
        host_memory: bytes that these tensors may occupy there, over all devices of a host, or ``"20GB"``; by
            default what is free.
        devices: the torch device of every device of the pipeline, ``"cuda:0,cuda:1"``, or ``"cuda"`` for one GPU
            each; under ``torchrun`` of every rank, on the rank's own host. The model's tensors are moved there, as by
            ``Module.to``. By default the model's device; threads on GPUs use one GPU each. Random numbers of a GPU
            differ from those of a CPU: a pipeline on GPUs equals one process on a GPU. Has not run on a GPU yet.
        share_devices: whether several devices of the pipeline may share one torch device, for tests of GPU code on one
            GPU.
        clip_norm: the maximum of the global 2-norm of all gradients, as in ``torch.nn.utils.clip_grad_norm_``;
            ``math.inf`` only measures it. ``grad_norm`` of the pipeline has it.
        scaler: scales losses for a step in float16: a ``torch.amp.GradScaler``, such as ``GradScaler("cpu")``, in the
            same state on every rank. ``step`` has the effect of ``scaler.scale(loss).backward()``, ``scaler.unscale_``,
            clipping, ``scaler.step(optimizer)`` and ``scaler.update()`` in one process: if a gradient of any stage is
            not finite, no stage steps, ``skipped`` of the pipeline is True, and the scale decreases. The scaler's
            ``get_scale()``, ``state_dict()`` and ``load_state_dict()`` work as usual. With ``update=False`` the scale
            does not change until the update. The result of ``step`` is not scaled. Parameters may not be float16; the
            step computes in float16 under ``torch.autocast``.
        compile: compiles the stages' graphs: ``"inductor"``, another backend of ``torch.compile`` by name, or a
            function ``(graph, example_inputs) -> function``. Sections of the stages' programs, such as layers with
            their products, attention, random draws and the sums of their gradients, are compiled before the first
            step; equal sections once, over all layers and stages. Such a function adds gradients to some of its inputs
            in place. Regions (Python code) are not compiled. Profiles time operators without it; the first steps of
            training measure the compiled code. Results
            are no longer bit-equal to the captured graph's: a fused sum rounds at other places, and in 16 bits it
            rounds less often. Of a section that the backend cannot compile, the groups of operators between products
            are compiled, and groups that it cannot compile run uncompiled; a line reports either. The first Inductor
            build on a machine takes half a minute, each further section one to ten seconds; Inductor caches them on
            disk.
        scheduler: called with each stage's optimizer, such as ``lambda o:
            torch.optim.lr_scheduler.CosineAnnealingLR(o, 1000)``, or one that returns a SequentialLR; stepped once
            after every update, so it counts updates, and neither batches whose gradients are kept nor epochs. Groups
            must be the same in every stage. ``learning_rates`` of the pipeline has the current rates; ``optimizers``
            are for schedulers that you step yourself, by epochs or by a metric.
        contest: whether the first steps of training compare up to four automatic plans: they run them in turns, about
            eight steps of each, and the plan with the fastest step wins. Results do not depend on it. With ranks,
            parameters move between them meanwhile: see the page Planning of the docs. A number is the least number of
            steps of each plan. False trains by the plan that is predicted to be the best. ``contest`` of the pipeline
            has the steps so far.
        plan_cache: whether an automatic plan is cached on disk (in ``$PANPIPE_CACHE``, by default
            ``~/.cache/panpipe``) and reused for the same model, shapes, arguments, machine and versions. False plans
            again and caches nothing.
        on_nonfinite: what to do if the loss over all replicas, or with ``clip_norm`` the norm of the gradients, is NaN
            or infinite. The report names the first microbatch and the stage in which that began, or the parameter.
            ``"warn"`` issues a RuntimeWarning, once for such steps in a row, and still updates; updates that a scaler
            skips are not reported. ``"skip"`` makes no update, as ``if not loss.isfinite(): continue`` before
            ``optimizer.step()`` in one process: parameters, optimizers and schedulers are as before, the step counts,
            and buffers have what the forward wrote; each is logged. With ``update=False`` it is the update of these
            gradients that is skipped. ``"raise"`` does the same and raises a NonFiniteError on every rank. In both all
            stages wait for the loss before they step. A scaler changes its scale by the gradients alone, as it does
            without this option. None checks nothing.
        monitor: a function, or a list of them, called after each step with a ``panpipe.StepReport``: loss, times,
            bubble, memory peaks and messages of all devices of all ranks, throughput, norm, loss scale. It is called on
            the rank of the first device alone (rank 0, unless ``mesh`` orders ranks otherwise), and must not call
            methods of the pipeline that all ranks call together. Its exceptions are logged and change nothing.
            ``panpipe.JsonLines(path)`` and ``panpipe.TensorBoard(folder)`` are ready ones. With a monitor all actions
            are timed, as by ``trace_step``.
        replan: ``"auto"`` compares the times of steps: when the fastest of twelve is 10 % slower than before, the
            pipeline looks for another plan between two steps, on all ranks at the same step, and the next steps
            compare it with the present one, as ``contest`` does. If no other plan gains, it waits longer before it
            tries again. None: only ``pipe.replan()`` does.
        shard: what the replicas of a stage share, so that each holds a part (ZeRO): ``"optimizer"``, each replica has
            and steps 1/dp of the optimizer's state: gradients are reduce-scattered, and parameters gathered after the
            step; ``"gradients"``, each replica keeps 1/dp of the gradients, too: they are reduce-scattered after the
            backward of each microbatch, also with ``update=False``; ``"parameters"``, and 1/dp of the parameters: they
            are gathered for runs of a stage's microbatches, as the plan says, and freed after them; ``"auto"`` does as
            little of that as fits, for the stages that do not fit otherwise; ``"none"``. By default as in the plan
            (``shard``, per stage); an automatic plan then shards nothing. Results are the same as without sharding. The
            optimizer has to be elementwise, such as SGD, Adam, AdamW, Adagrad or RMSprop; this is tested, and others
            are refused. The optimizers in ``optimizers`` step slices of the parameters, ``grad`` of a parameter is None
            after a step, and every rank calls ``state_dict()``. With ``"parameters"`` their values are there within
            ``with pipe.whole_parameters():`` alone. Checkpoints do not depend on it.
        progress: True shows the phases of planning on standard error, on rank 0; False shows nothing; a function is
            called as ``progress(phase, done, total)``, with 0 and 0 for a phase without parts.
        timeout_s: the seconds that a rank (a device, between threads) waits for others that make no progress. Then all
            ranks end with a line that names who waits for whom in which action, and what the late rank did last. An
            action, such as one forward of a stage, is progress when it ends; a pause of all ranks between steps does
            not count as waiting. None is the environment variable ``PANPIPE_TIMEOUT_S``, or 300.
        cuda_graphs: captures the programs of each stage as CUDA graphs, one for each kind of action and microbatch, and
            replays them: a step then has one call of the host for each action instead of one for each operator. Each
            device captures before its first message, and again for microbatches of another shape, for steps that add to
            gradients of earlier ones (``update=False``), and when a parameter's memory has moved. Results are the same
            as without. All memory of the programs stays allocated between steps. Stages that run Python code are left
            out, with a warning. Evaluations run without graphs. Not with ``offload``, nor with ``shard="gradients"`` or
            ``"parameters"``. Has not run on a GPU yet.

    Returns:
        The pipeline; its ``step(batch)`` trains.

    Raises:
        RequestError: an argument is wrong; the message names value, rule and fix.
        InfeasibleError: no plan fits in memory.

    Example:
        >>> pipe = panpipe.pipeline(model, step, batch, optimizer=torch.optim.AdamW)  # doctest: +SKIP
        >>> loss = pipe.step(batch)  # doctest: +SKIP
    """
    options = PipelineOptions(
        training=Training(clip_norm, scaler, scheduler, optimizer, seed, on_nonfinite),
        planning=PlanningOptions(
            oracle=simulated,
            cut_oracle=longest_path,
            schedule=schedule,
            max_chunks=max_chunks,
            cluster=cluster,
            recompute=recompute,
            offload="none" if offload is None else offload,
            tier=OffloadTier(offload_to, host_memory),
            shard="none" if shard is None else shard,
            contest=contest,
            cached=plan_cache,
            boundaries=boundaries,
        ),
        devices=DeviceOptions(devices, share_devices),
        target=target,
        microbatches=microbatches,
        plan=plan,
        mesh=mesh,
        backend=backend,
        weights=weights,
        compile=compile,
        batch_dims=batch_dims,
        dynamic=dynamic,
        offload=offload,
        monitors=monitor,
        timeout_s=timeout_s,
        replan=replan,
        shard=shard,
        cuda_graphs=cuda_graphs,
    )
    virtual = SimulatedDevices(options) if options.simulated else None
    with show_progress(progress, (rank_of_job() or (0, 1))[0] == 0) as report:
        return build_pipeline(model, step, example_batch, options, virtual, report)
