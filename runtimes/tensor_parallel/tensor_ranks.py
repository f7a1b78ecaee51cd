"""The tensor ranks of a pipeline: ranks that share the work of each stage, with one batch.

torch's ``parallelize_module`` has split the user's model over a mesh of ranks. Every rank trains its own parts, as a
plain model; the all-reduces that DTensor recorded run inside F, B, I and W, over the group of the user's mesh::

    tensor rank 0     F0 ─ all-reduce ─▶ … ──▶ B0 ─ all-reduce ─▶ …      one pipeline for each tensor rank, which runs
                             ╎                          ╎                the plan on its parts; all with equal batches
    tensor rank 1     F0 ─ all-reduce ─▶ … ──▶ B0 ─ all-reduce ─▶ …

In teams and lowered plans these pipelines are *replicas*, so that REDUCE_GRAD sums the gradients of whole parameters
over them. Parts of parameters are not summed. The losses of all of them are equal, so the means over replicas are
those of one process (`core/tensor_collectives`).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from attrs import evolve, field, frozen
from torch import Tensor, nn

from ...backends.data_collectives import all_gather_data
from ...core.capture.export.operators import Operators
from ...core.capture.python.refusals import gradient_hooks
from ...core.capture.values.sparse_tensors import distributed_tensors
from ...core.cluster.mesh import Mesh, MeshShape
from ...core.cluster.tensor_groups import GroupedCluster
from ...core.costs.costs import StageCosts
from ...core.costs.reductions import TensorReductions, sum_of
from ...core.errors import RequestError, WorkerError, message_of
from ...core.plan.plan import Plan
from ...core.policies.sharding import NONE
from ...core.tensor_collectives import MAX, SUM, communicating
from ...core.wording import module_text
from ..batch.example import Example
from ..batch.lru_cache import LruCache
from ..flat_bytes import flat_bytes
from ..launch.rank_tensors import RankTensors, Split
from ..programs.compiled import Compiled
from ..watch.activity import HERE
from .layouts import LinkedModel
from .recording import StepOfRank, program_of_rank

Step = Callable[[nn.Module, Any], Any]
Reductions = Mapping[str, TensorReductions | None]
"""Operator → its all-reduces over tensor ranks."""

_NEAR = 1e-3
"""Largest relative difference of equal results: more than the rounding of bfloat16 sums in another order."""
_KEPT = 4
"""Number of functions that are evaluated whose recorded programs are kept."""


@frozen
class TensorRanks(RankTensors):
    """The ranks that share each stage with this one.

    Args:
        model: the user's, with DTensors.
        parts: a plain model of this rank's parts, which share their memory with the user's.
        step: computes with it.
        dims: names of the parameters of which each rank has a part, with the dimension that is divided and the shape
            of the part.
        ranks: of this rank's group, in the order of the user's mesh.
        data: number of batches of a step, each of which has a pipeline of all tensor ranks.
        pipeline_last: whether ranks next to each other, but for tensor ranks, are along the pipeline.
    """

    model: nn.Module
    parts: nn.Module
    step: StepOfRank
    linked: LinkedModel
    dims: Mapping[str, tuple[int, tuple[int, ...]]]
    ranks: tuple[int, ...]
    group: Any
    data: int = 1
    pipeline_last: bool = True
    divided = True
    _steps: LruCache[Step, StepOfRank] = field(factory=lambda: LruCache(_KEPT), init=False)

    @classmethod
    def of(cls, model: nn.Module, step: Step) -> "TensorRanks | None":
        """Those of a model; None for one without DTensors.

        Raises:
            RequestError: its layouts are not supported.
        """
        found = distributed_tensors(model)
        if not found:
            return None
        mesh = next(iter(found.values())).device_mesh
        if not dist.is_initialized() or dist.get_backend() == "fake":
            raise RequestError(
                f"'{next(iter(found))}' is a DTensor over torch's fake process group, which moves nothing: plan with "
                "panpipe plan --tp, or start ranks with torchrun"
            )
        _refuse_fsdp(model)
        _refuse_hooks(model)
        parts, of_rank = program_of_rank(model, step, mesh.size())
        dims = {
            name: (value.placements[0].dim, tuple(value.to_local().shape))
            for name, value in found.items()
            if value.placements[0].is_shard()
        }
        group = mesh.get_group()
        return cls(
            model, parts, of_rank, LinkedModel(model, parts), dims, tuple(dist.get_process_group_ranks(group)), group
        )

    def step_of(self, function: Step) -> StepOfRank:
        """The same function of the parts; recorded once, if it is the same object in every call."""
        if isinstance(function, StepOfRank):
            return function
        found = self._steps.use(function)
        if found is None:
            found = self.step.of(function)
            self._steps.keep(function, found)
        return found

    @property
    def split(self) -> frozenset[str]:
        """Names of the parameters of which each rank has a part."""
        return frozenset(self.dims)

    def split_of(self, name: str, shape: tuple[int, ...]) -> Split | None:
        """How a tensor of this shape that belongs to a parameter is divided; None if every rank has all of it.

        Args:
            shape: of the tensor on this rank; state of an optimizer is divided if it has the shape of the part.
        """
        dim, own = self.dims.get(name, (0, None))
        return Split(dim, self.ranks.index(dist.get_rank()), self.size) if own == shape else None

    def gather(self, part: Tensor, split: Split) -> Tensor:
        """The whole of a tensor of which each rank has a part, on the CPU. All of them call this together."""
        return torch.cat(GroupCollectives(self.ranks, self.group).gather_parts(part), split.dim)

    @property
    def size(self) -> int:
        """Number of tensor ranks of a stage."""
        return len(self.ranks)

    def program(self, model: nn.Module, step: Step) -> tuple[nn.Module, Step]:
        """A plain model of this rank's parts, and the step that computes with it."""
        return self.parts, self.step

    def whole_model(self, model: nn.Module) -> nn.Module:
        """The user's model, with DTensors."""
        return self.model

    def follow(self) -> None:
        self.linked.follow()

    def publish_gradients(self) -> None:
        self.linked.publish_gradients()

    def release(self) -> None:
        self.linked.release()

    def mesh(self, asked: Any) -> Mesh:
        return self.mesh_of(all_gather_data(self.ranks))

    def mesh_of(self, groups: Sequence[Sequence[int]]) -> Mesh:
        """The mesh of all ranks, with a replica for each tensor rank of a stage.

        Raises:
            RequestError: they are no mesh.
        """
        rows = sorted({tuple(group) for group in groups})
        whole = len({len(row) for row in rows}) == 1 and sorted(r for row in rows for r in row) == [*range(len(groups))]
        if not whole:
            raise RequestError(
                f"the models' tensor ranks are {', '.join(str(list(row)) for row in rows)}: each rank of the job must "
                "be in one group, and all groups must be equally large; take them from one mesh, such as "
                'init_device_mesh("cpu", (2, 2), '
                'mesh_dim_names=("pp", "tp"))["tp"]'
            )
        if len(rows) % self.data:
            raise RequestError(
                f"mesh has {self.data} replicas (dp) and the job has {len(rows)} groups of {self.size} tensor ranks: "
                "give dimensions whose product is the number of ranks"
            )
        positions = len(rows) // self.data
        along, across = (1, positions) if self.pipeline_last else (self.data, 1)
        of_batches = [[rows[p * along + d * across] for p in range(positions)] for d in range(self.data)]
        replicas = tuple(tuple(row[part] for row in pipeline) for pipeline in of_batches for part in range(self.size))
        return Mesh(positions, self.data * self.size, replicas)

    def planned(self, plan: Plan, mesh: Mesh) -> Plan:
        """The plan for the ranks of the job.

        Args:
            plan: with tensor ranks, as ``panpipe plan --tp`` writes it; or of the ranks already.

        Raises:
            RequestError: the plan is for other ranks.
        """
        if self.data == 1 and any(level != NONE for level in plan.shard):
            self.refuse("the plan has shard 'optimizer' and one replica")
        if plan.mesh.tensor == 1 and plan.mesh.data == mesh.data and plan.mesh.pipeline == mesh.pipeline:
            return evolve(plan, mesh=mesh)
        if (plan.mesh.pipeline, plan.mesh.data, plan.mesh.tensor) != (mesh.pipeline, self.data, self.size):
            raise RequestError(
                f"the plan is for pp={plan.mesh.pipeline},dp={plan.mesh.data},tp={plan.mesh.tensor} and the model's "
                f"DTensors and the ranks of the job are pp={mesh.pipeline},dp={self.data},tp={self.size}: plan again "
                f"with --tp {self.size}"
            )
        return evolve(plan, mesh=mesh, prediction=None)

    def shown(self, plan: Plan, reductions: Callable[[], Reductions]) -> Plan:
        """The plan of the ranks of the job as one with tensor ranks, as ``panpipe plan --tp`` writes it.

        Args:
            plan: with a replica for each tensor rank.
            reductions: returns by operator its all-reduces over tensor ranks.
        """
        replicas = plan.mesh.devices
        assert replicas is not None
        rows = tuple(
            tuple(device for position in zip(*replicas[first : first + self.size], strict=True) for device in position)
            for first in range(0, len(replicas), self.size)
        )
        shown = evolve(plan, mesh=Mesh(plan.mesh.pipeline, self.data, rows, self.size), prediction=None)
        prediction = plan.prediction
        if prediction is None:
            return shown
        try:
            cluster = shown.mesh.arrange(prediction.cluster)
        except RequestError:  # ranks of one stage have unequal memory: a prediction is for equal ones
            return shown
        assert isinstance(cluster, GroupedCluster)
        of_node = reductions()
        costs = tuple(
            _with_reductions(cost, sum_of(of_node[node] for node in stage.nodes), self.size, cluster.slowest())
            for stage, cost in zip(plan.stages, prediction.costs, strict=True)
        )
        known = any(cost.reductions is not None for cost in costs)
        return evolve(shown, prediction=evolve(prediction, costs=costs)) if known else shown

    def check_mesh(self, asked: Mesh | MeshShape | None, mesh: Mesh) -> None:
        """Refuse a mesh of the user that is not that of the ranks and of the model's DTensors.

        Raises:
            RequestError: they differ.
        """
        if isinstance(asked, MeshShape):
            given = asked.pipeline, asked.tensor
        else:
            given = (None, None) if asked is None else (asked.pipeline, asked.tensor)
        if given[0] not in (None, mesh.pipeline) or given[1] not in (None, self.size):
            raise RequestError(
                f"mesh is {asked} and the model's DTensors and the ranks of the job are pp={mesh.pipeline},"
                f"dp={self.data},tp={self.size}: write that, or leave mesh out"
            )

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """A context in which collectives in programs reach the other tensor ranks."""
        with communicating(GroupCollectives(self.ranks, self.group)):
            yield

    def check(self, compiled: Iterable["Compiled | Example"]) -> None:
        """Refuse programs whose results would differ from those of one process.

        Raises:
            RequestError: one of them writes a buffer.
        """
        for operators in {id(each.operators): each.operators for each in compiled}.values():
            _refuse_written_buffers(operators)

    def check_equal(self, replicas: Callable[[], Sequence[Sequence[Sequence[float]]]]) -> None:
        """Refuse results that differ between tensor ranks.

        Args:
            replicas: returns for each rank of each batch the loss, weight and metrics of each microbatch.

        Raises:
            RequestError: they differ by more than rounding.
        """
        found = replicas()
        for number, rows in enumerate(found):
            part = number % self.size
            for microbatch, (row, first) in enumerate(zip(rows, found[number - part], strict=True)):
                for place, (value, wanted) in enumerate(zip(row, first, strict=True)):
                    near = math.isclose(value, wanted, rel_tol=_NEAR, abs_tol=_NEAR)
                    if not near and not (math.isnan(value) and math.isnan(wanted)):
                        what = ("the loss", "the weight")[place] if place < 2 else "a metric"
                        raise RequestError(
                            f"{what} of microbatch {microbatch} is {value:g} on tensor rank {part} and {wanted:g} on "
                            "tensor rank 0: layouts must give the step the same results on all of them; use "
                            "output_layouts=Replicate() in the last layer, or loss_parallel; the update was made with "
                            "them"
                        )

    def refuse(self, what: str) -> NoReturn:
        """Refuse what tensor ranks do not support.

        Args:
            what: the subject and its verb, such as "clip_norm is 1.0".

        Raises:
            RequestError: always.
        """
        raise RequestError(f"{what}: not supported for models with DTensor parameters yet; {_SUPPORTED}")


def _with_reductions(
    cost: StageCosts, found: TensorReductions | None, ranks: int, ring: tuple[float, float]
) -> StageCosts:
    """Measured costs, whose times contain the all-reduces, with what these take over idle links."""
    if found is None:
        return cost
    timed = found.timed(ranks, *ring)
    forward_s = min(timed.forward_s, cost.forward_s, cost.second_forward_s)
    backward_s = min(timed.backward_s, cost.backward_input_s, cost.full_backward_s)
    return evolve(cost, reductions=evolve(timed, forward_s=forward_s, backward_s=backward_s))


_SUPPORTED = "use step() with a given or an automatic plan, an elementwise optimizer, and gloo"


def _refuse_written_buffers(operators: Operators) -> None:
    written = [f"buffer '{name}'" for name in operators.step.mutated_buffers]
    written += [f"parameter '{name}'" for name in operators.step.clamps]
    if written:
        raise RequestError(
            f"the step writes the {written[0]}: tensor ranks do not support written buffers and parameters yet; avoid "
            "the write, as model.eval() does for BatchNorm"
        )


def _refuse_fsdp(model: nn.Module) -> None:
    from torch.distributed.fsdp import FSDPModule

    name = next((name for name, module in model.named_modules() if isinstance(module, FSDPModule)), None)
    if name is not None:
        raise RequestError(
            f"fully_shard was applied to {module_text(name)}: stages have whole layers, without FSDP inside; leave it "
            "out, and let replicas share with Memory(shard=)"
        )


def _refuse_hooks(model: nn.Module) -> None:
    what = next((owner for owner, _, _ in gradient_hooks(model)), None)
    if what is not None:
        raise RequestError(
            f"{what} has a gradient hook: the backward of models with DTensor parameters is derived from their "
            "forward, without hooks; remove it"
        )


_OPERATIONS = {SUM: dist.ReduceOp.SUM, MAX: dist.ReduceOp.MAX}


class GroupCollectives:
    """Runs collectives over a process group.

    Args:
        ranks: of the job, in the group's order.

    Attributes:
        rank: the number of this rank in the group.
    """

    def __init__(self, ranks: Sequence[int], group: Any) -> None:
        self._group, self._ranks = group, ranks
        self._others = tuple(rank for rank in ranks if rank != dist.get_rank())
        self.rank = ranks.index(dist.get_rank())

    def all_reduce(self, part: Tensor, operation: str) -> None:
        """See `Collectives`."""
        self._wait(lambda: dist.all_reduce(part, _OPERATIONS[operation], group=self._group))

    def all_gather(self, part: Tensor, whole: Tensor) -> None:
        """See `Collectives`."""
        self._wait(lambda: dist.all_gather_into_tensor(whole, part, group=self._group))

    def reduce_scatter(self, whole: Tensor, part: Tensor) -> None:
        """See `Collectives`."""
        self._wait(lambda: dist.reduce_scatter_tensor(part, whole, group=self._group))

    def gather_parts(self, part: Tensor) -> list[Tensor]:
        """The ranks' tensors of one shape and dtype, on the CPU, in order."""
        own = part.detach().cpu()
        data = flat_bytes(own)  # gloo does not know all dtypes
        of_all = [torch.empty_like(data) for _ in self._ranks]
        self._wait(lambda: dist.all_gather(of_all, data, group=self._group))
        return [each.view(own.dtype).reshape(own.shape) for each in of_all]

    def _wait(self, work: Callable[[], Any]) -> None:
        with HERE.waiting(self._others, "a collective of tensor ranks"):
            try:
                work()
            except RuntimeError as error:
                raise WorkerError.stopped_answering(self._others, message_of(error)) from error
