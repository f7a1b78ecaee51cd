"""The groups of arguments of ``panpipe.pipeline``: how it plans, its memory, its updates, and how it runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import Factory, field, fields, frozen
from torch.amp.grad_scaler import GradScaler

from ..core.arguments import byte_size, whole_number
from ..core.cluster.catalog import find_cluster
from ..core.cluster.cluster import Cluster, with_limit
from ..core.errors import RequestError, refuse_no_bool
from ..core.offload.request import OffloadRequest, check_offload_request
from ..core.policies.recompute import Recompute
from ..core.policies.sharding import AUTO as SHARD_AUTO
from ..core.policies.sharding import NONE, check_level
from ..core.schedules.problem import ScheduleFamily
from ..core.schedules.registry import families, find_family, resident_families
from ..core.search import Oracle
from ..core.search.problem.blocks import check_boundaries
from ..core.wording import value_text
from .launch.progress import Progress
from .monitor.monitors import Monitor, monitors_of
from .offload.tier import HOST, OffloadTier
from .planning.contest import contest_rounds
from .programs.compiler_choice import Compile, CompilerChoice
from .update.optimizers import SchedulerFactory
from .watch.positions import timeout_of
from .weights import ModuleInit

AUTO = "auto"
"""Whatever the planner chooses."""
RAISE, SKIP, WARN = "raise", "skip", "warn"
ON_NONFINITE = (RAISE, SKIP, WARN)
"""The choices for a loss that is not finite; see `training/step_checks`."""


def values_of(group: Any, kind: type) -> dict[str, Any]:
    """The arguments of a group, by the names that its class ``kind`` has for them."""
    return {each.name: getattr(group, each.name) for each in fields(kind) if each.init}


def _schedule(given: str) -> str:
    if given != AUTO:
        find_family(given)
    return given


def _found(cluster: Cluster | str | Path | None) -> Cluster | None:
    return find_cluster(cluster) if isinstance(cluster, str | Path) else cluster


def _chunks(given: Any) -> int:
    return whole_number("max_chunks", given, 1)


def _boundaries(given: str) -> str:
    check_boundaries(given)
    return given


@frozen(kw_only=True)
class Auto:
    """How an automatic plan is found: ``plan="auto"`` is ``Auto()``, and ``plan="1f1b"`` is ``Auto(schedule="1f1b")``.

    Args:
        schedule: the name of the only schedule (``panpipe schedule --list``), or ``"auto"`` for any, and for orders of
            actions of no schedule.
        max_chunks: the most stages of a device.
        boundaries: where a stage may end: after any of the ``"operators"``; or, with ``"layers"``, between layers only,
            which are the children of a ModuleList or Sequential that repeat.
        cluster: the machine, as a Cluster, a file, or a name such as ``8xA100-40GB``; None measures the one at hand.
        contest: whether the first steps of training compare up to four plans: they run them in turns, about eight steps
            of each, and the plan with the fastest step wins. Results do not depend on it. With ranks, parameters move
            between them meanwhile, at most a tenth of the time: see the page Planning of the docs. A number is the
            least number of steps of each plan, whatever moves take. False trains by the plan that is predicted to be
            the best. ``contest`` of the pipeline has the steps
            so far.
        cache: whether the plan is cached on disk (in ``$PANPIPE_CACHE``, by default ``~/.cache/panpipe``) and reused
            for the same model, shapes, arguments, machine and versions. False plans again and caches nothing.

    Attributes:
        rounds: of the contest; 0 for none.

    Raises:
        RequestError: a schedule, cluster or boundary that does not exist, or a value of another kind.
    """

    schedule: str = field(default=AUTO, converter=_schedule)
    max_chunks: int = field(default=2, converter=_chunks)
    boundaries: str = field(default="operators", converter=_boundaries)
    cluster: Cluster | None = field(default=None, converter=_found)
    contest: bool | int = True
    cache: bool = True
    rounds: int = field(init=False)

    @rounds.default
    def _rounds(self) -> int:
        return contest_rounds(self.contest)

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.cache, bool):
            raise RequestError(f"cache is {self.cache!r}: give True or False; PANPIPE_CACHE names the folder")


def _limit(given: int | str | None) -> float | None:
    return byte_size("limit", given, model=True)


def _recompute(given: Recompute | None) -> Recompute | None:
    return None if given == AUTO else given


@frozen(kw_only=True)
class Memory:
    """What the devices hold, and what leaves them.

    Args:
        limit: bytes that an automatic plan may use of each device, such as ``"20GB"``; None for all that is there.
        recompute: ``"none"``, ``"all"``, or the numbers of the stages that run their forward a second time, before
            the backward, instead of holding its saved tensors. ``"auto"``: as in the plan, or chosen by the planner. As
            an attribute, None for that.
        offload: which saved tensors leave their device between forward and backward: ``"none"``; ``"all"``, as much as
            the links carry without a longer step; ``"auto"``, only if memory is short, what makes the step fastest
            together with ``recompute``; or a dict from stage to the share of its bytes, from 0 to 1. By default as in
            the plan (``memory.offload``); an automatic plan then offloads nothing. See the page Offload of the docs.
        offload_to: where offloaded tensors go: ``"host"``, the host's memory, pinned for a GPU; ``"disk"``, a file in
            the folder for temporary files; or the folder of that file. For devices on the CPU the host's memory is
            their own, and only a file frees memory. The file has no name and ends with the process.
        host: bytes that these tensors may occupy there, over all devices of a host, or ``"20GB"``; by default what is
            free.
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
            ``with panpipe.weights.whole_parameters(pipe):`` alone. Checkpoints do not depend on it.

    Attributes:
        tier: where offloaded tensors go.

    Raises:
        RequestError: one of them has a value that it cannot have.
    """

    limit: float | None = field(default=None, converter=_limit)
    recompute: Recompute | None = field(default=None, converter=_recompute)
    offload: OffloadRequest | None = None
    offload_to: str | Path = HOST
    host: int | str | None = None
    shard: str | None = None
    tier: OffloadTier = field(init=False)

    @tier.default
    def _tier(self) -> OffloadTier:
        return OffloadTier(self.offload_to, self.host)

    def __attrs_post_init__(self) -> None:
        if self.offload is not None:
            check_offload_request(self.offload)
        if self.shard is not None:
            check_level(self.shard, SHARD_AUTO)


@frozen(kw_only=True)
class Update:
    """What happens in an update, in addition to the optimizers' steps.

    Args:
        clip_norm: the maximum of the global 2-norm of all gradients, as in ``torch.nn.utils.clip_grad_norm_``;
            ``math.inf`` only measures it. ``metrics.grad_norm`` of the pipeline has it.
        scaler: scales losses for a step in float16: a ``torch.amp.GradScaler``, such as ``GradScaler("cpu")``, in the
            same state on every rank. ``step`` has the effect of ``scaler.scale(loss).backward()``, ``scaler.unscale_``,
            clipping, ``scaler.step(optimizer)`` and ``scaler.update()`` in one process: if a gradient of any stage is
            not finite, no stage steps, ``metrics.skipped`` of the pipeline is True, and the scale decreases. The
            scaler's ``get_scale()``, ``state_dict()`` and ``load_state_dict()`` work as usual. With ``update=False``
            the scale does not change until the update. The result of ``step`` is not scaled. Parameters may not be
            float16; the step computes in float16 under ``torch.autocast``.
        scheduler: called with each stage's optimizer, such as ``lambda o:
            torch.optim.lr_scheduler.CosineAnnealingLR(o, 1000)``, or one that returns a SequentialLR; stepped once
            after every update, so it counts updates, and neither batches whose gradients are kept nor epochs. Groups
            must be the same in every stage. ``optimizers`` are for schedulers that you step yourself, by epochs or by a
            metric.
        on_nonfinite: what to do if the loss over all replicas, or with ``clip_norm`` the norm of the gradients, is NaN
            or infinite. The report names the first microbatch and the stage in which that began, or the parameter.
            ``"warn"`` issues a RuntimeWarning, once for such steps in a row, and still updates; updates that a scaler
            skips are not reported. ``"skip"`` makes no update, as ``if not loss.isfinite(): continue`` before
            ``optimizer.step()`` in one process: parameters, optimizers and schedulers are as before, the step counts,
            and buffers have what the forward wrote; each is logged. With ``update=False`` it is the update of these
            gradients that is skipped. ``"raise"`` does the same and raises a NonFiniteError on every rank. In both all
            stages wait for the loss before they step. A scaler changes its scale by the gradients alone, as it does
            without this option. None checks nothing.

    Raises:
        RequestError: one of them has a value that it cannot have.
    """

    clip_norm: float | None = None
    scaler: GradScaler | None = None
    scheduler: SchedulerFactory | None = None
    on_nonfinite: str | None = WARN

    def __attrs_post_init__(self) -> None:
        norm = self.clip_norm
        if norm is not None and (isinstance(norm, bool) or not isinstance(norm, int | float) or not norm > 0):
            raise RequestError(
                f"clip_norm is {norm!r}: gradients are clipped to a norm above 0; give a positive number, math.inf to "
                "measure the norm alone, or None"
            )
        if self.scaler is not None and not isinstance(self.scaler, GradScaler):
            raise RequestError(
                f"scaler is {value_text(self.scaler)}: losses are scaled by a torch.amp.GradScaler; give one, such as "
                "torch.amp.GradScaler('cpu'), or None"
            )
        if self.scheduler is not None and not callable(self.scheduler):
            raise RequestError(
                f"scheduler is {value_text(self.scheduler)}: give a function of an optimizer, such as lambda o: "
                "torch.optim.lr_scheduler.CosineAnnealingLR(o, 1000)"
            )
        if self.on_nonfinite is not None and self.on_nonfinite not in ON_NONFINITE:
            raise RequestError(
                f"on_nonfinite is {self.on_nonfinite!r}: a loss that is not finite raises an error, skips the update "
                "or warns; give 'raise', 'skip', 'warn', or None for no check"
            )


def seed_of(given: Any) -> int:
    """The seed as an int."""
    return whole_number("seed", given)


def _first_step(given: Any) -> int:
    return whole_number("first_step", given, 0)


@frozen(kw_only=True)
class Run:
    """How a pipeline starts and runs.

    Args:
        seed: of all random numbers.
        first_step: the number of the first step, from 0, whose random numbers it has: for training that goes on from
            weights without a checkpoint of training.
        weights: the source of values for parameters and buffers on meta. None: each module's ``reset_parameters()``. A
            function ``init(module)``, called as FSDP's ``param_init_fn``, for each module with own parameters or
            buffers; for a model of transformers it is ``model._init_weights``. Its random numbers depend on the seed
            and the module's name, never on the plan. Or the path of a ``.safetensors`` file, of a
            ``model.safetensors.index.json``, or of a folder with either: it sets all tensors that the step reads, on
            meta or not, one tensor at a time.
        compile: compiles the stages' graphs: ``"inductor"``, another backend of ``torch.compile`` by name, or a
            function ``(graph, example_inputs) -> function``. Sections of the stages' programs, such as layers with
            their products, attention, random draws and the sums of their gradients, are compiled before the first
            step; equal sections once, over all layers and stages. Such a function adds gradients to some of its inputs
            in place. Regions (Python code) are not compiled. Profiles time operators without it; the first steps of
            training measure the compiled code. Results are no longer bit-equal to the captured graph's: a fused sum
            rounds at other places, and in 16 bits it rounds less often. Of a section that the backend cannot compile,
            the groups of operators between products are compiled, and groups that it cannot compile run uncompiled; a
            line reports either. The first Inductor build on a machine takes half a minute, each further section one to
            ten seconds; Inductor caches them on disk.
        cuda_graphs: captures the programs of each stage as CUDA graphs, one for each kind of action and microbatch, and
            replays them: a step then has one call of the host for each action instead of one for each operator. Each
            device captures before its first message, and again for microbatches of another shape, for steps that add to
            gradients of earlier ones (``update=False``), and when a parameter's memory has moved. Results are the same
            as without. All memory of the programs stays allocated between steps. Devices of which a stage runs Python
            code are left out, with a warning. Evaluations run without graphs. Not with ``offload``, nor with
            ``shard="gradients"`` or ``"parameters"``. Has not run on a GPU yet.
        monitor: a function, or a list of them, called after each step with a ``panpipe.monitors.StepReport``: loss,
            times, bubble, memory peaks and messages of all devices of all ranks, throughput, norm, loss scale. It is
            called on the rank of the first device alone (rank 0, unless ``mesh`` orders ranks otherwise), and must not
            call methods of the pipeline that all ranks call together. Its exceptions are logged and change nothing.
            ``panpipe.monitors`` has ready ones, ``JsonLines(path)`` and ``TensorBoard(folder)``. With a monitor all
            actions are timed, as by ``trace_step``.
        progress: True shows the phases of planning on standard error, on rank 0, and later captures that take more than
            2 s, as of a new size or of the first evaluation; False shows nothing; a function is called as
            ``progress(phase, done, total)``, with 0 and 0 for a phase without parts, of captures by another thread.
        timeout_s: the seconds that a rank (a device, between threads) waits for others that make no progress. Then all
            ranks end with a line that names who waits for whom in which action, and what the late rank did last. An
            action, such as one forward of a stage, is progress when it ends; a pause of all ranks between steps does
            not count as waiting. None is the environment variable ``PANPIPE_TIMEOUT_S``, or 300.
        replan: ``"auto"`` compares the times of steps with those of nearly the same size of batch: when the fastest of
            twelve is 10 % slower than before, or than recorded with a plan from the cache, the pipeline looks for
            another plan between two steps, on all ranks at the same step, and the next steps compare it with the
            present one, as a contest does. If there is none, it waits longer before it tries again. None: only
            ``pipe.replan()`` does.
        share_devices: whether several devices of the pipeline may share one torch device, for tests of GPU code on one
            GPU.

    Raises:
        RequestError: one of them has a value that it cannot have.
    """

    seed: int = field(default=0, converter=seed_of)
    first_step: int = field(default=0, converter=_first_step)
    weights: str | Path | ModuleInit | None = None
    compile: str | Compile | None = None
    cuda_graphs: bool = False
    monitor: Monitor | Sequence[Monitor] | None = None
    progress: bool | Progress = True
    timeout_s: float = field(default=None, converter=timeout_of)
    replan: str | None = None
    share_devices: bool = False
    compiler: CompilerChoice | None = field(init=False)
    monitors: tuple[Monitor, ...] = field(init=False)

    def __attrs_post_init__(self) -> None:
        refuse_no_bool(cuda_graphs=self.cuda_graphs, share_devices=self.share_devices)
        if self.replan not in (None, AUTO):
            raise RequestError(f"replan is {self.replan!r}: give 'auto', or None and call pipe.replan()")

    @compiler.default
    def _compiler(self) -> CompilerChoice | None:
        return CompilerChoice.of(self.compile)

    @monitors.default
    def _monitors(self) -> tuple[Monitor, ...]:
        return monitors_of(self.monitor)


def _families(options: "PlanningOptions") -> list[ScheduleFamily]:
    if not options.anneal:
        return [find_family(options.schedule)]
    return resident_families() if options.offload == "none" else list(families().values())


@frozen(kw_only=True)
class PlanningOptions(Auto):
    """How an automatic plan is searched.

    Args:
        cut_oracle: scores a plan during the search for cuts; a fast one.
        memory: what the devices may hold, and what leaves them.

    Attributes:
        families: the schedules to choose among.
    """

    oracle: Oracle
    cut_oracle: Oracle
    memory: Memory = field(factory=Memory)
    families: list[ScheduleFamily] = field(init=False, default=Factory(_families, takes_self=True))

    @classmethod
    def of(cls, auto: Auto, memory: Memory, oracle: Oracle, cut_oracle: Oracle) -> "PlanningOptions":
        """The options of the user's groups."""
        given = values_of(auto, Auto)
        if auto.cluster is not None:
            given["cluster"] = with_limit(auto.cluster, memory.limit)
        return cls(**given, memory=memory, oracle=oracle, cut_oracle=cut_oracle)

    @property
    def offload(self) -> OffloadRequest:
        """What leaves the devices between F and the backward."""
        return "none" if self.memory.offload is None else self.memory.offload

    @property
    def shard(self) -> str:
        """What replicas share (see ``core/policies/sharding``): a level, or ``"auto"``."""
        return self.memory.shard or NONE

    @property
    def anneal(self) -> bool:
        """Whether orders of actions may differ from those of the schedules."""
        return self.schedule == AUTO
