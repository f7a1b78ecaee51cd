"""The tensor ranks of a pipeline: ranks that share the work of each stage, with one batch.

torch's ``parallelize_module`` has split the user's model over a mesh of ranks. Every rank trains its own parts, as a
plain model; the all-reduces that DTensor recorded run inside F, B, I and W, over the group of the user's mesh::

    tensor rank 0     F0 ─ all-reduce ─▶ … ──▶ B0 ─ all-reduce ─▶ …      one pipeline for each tensor rank, which runs
                             ╎                          ╎                the plan on its parts; all with equal batches
    tensor rank 1     F0 ─ all-reduce ─▶ … ──▶ B0 ─ all-reduce ─▶ …

In teams and lowered plans these pipelines are *replicas*, so that REDUCE_GRAD sums the gradients of whole parameters
over them. Parts of parameters are not summed. The losses of all of them are equal, so the means over replicas are
those of one process (`core/capture/graph/tensor_sums`).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch.distributed as dist
from attrs import evolve, field, frozen
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...core.capture.export.operators import Operators
from ...core.capture.graph.tensor_sums import communicating
from ...core.capture.values.distributed_tensors import distributed_tensors
from ...core.cluster.mesh import PIPELINE, TENSOR, Mesh, MeshShape
from ...core.errors import RequestError
from ...core.plan.plan import Plan
from ...core.wording import module_text
from ..batch.example import Example
from ..batch.lru_cache import LruCache
from ..programs.compiled import Compiled
from .group_collectives import GroupCollectives
from .linked_model import LinkedModel
from .recording import StepOfRank, program_of_rank

Step = Callable[[nn.Module, Any], Any]

_NEAR = 1e-3
"""Largest relative difference of equal results: more than the rounding of bfloat16 sums in another order."""
_KEPT = 4
"""Number of functions that are evaluated whose recorded programs are kept."""


@frozen
class TensorRanks:
    """The ranks that share each stage with this one.

    Args:
        model: the user's, with DTensors.
        parts: a plain model of this rank's parts, which share their memory with the user's.
        step: computes with it.
        linked: keeps both in step.
        split: names of the parameters of which each rank has a part.
        ranks: of this rank's group, in the order of the user's mesh.
        group: torch's process group of them.
    """

    model: nn.Module
    parts: nn.Module
    step: StepOfRank
    linked: LinkedModel
    split: frozenset[str]
    ranks: tuple[int, ...]
    group: Any
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
        split = frozenset(name for name, value in found.items() if not value.placements[0].is_replicate())
        group = mesh.get_group()
        return cls(
            model, parts, of_rank, LinkedModel(model, parts), split, tuple(dist.get_process_group_ranks(group)), group
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
    def size(self) -> int:
        """Number of tensor ranks of a stage."""
        return len(self.ranks)

    def mesh(self, groups: Sequence[Sequence[int]]) -> Mesh:
        """The mesh of all ranks, with a replica for each tensor rank of a stage.

        Args:
            groups: for each rank of the job its tensor ranks.

        Raises:
            RequestError: they are no mesh.
        """
        rows = sorted({tuple(group) for group in groups})
        whole = len({len(row) for row in rows}) == 1 and sorted(r for row in rows for r in row) == [*range(len(groups))]
        if not whole:
            raise RequestError(
                f"the models' tensor ranks are {', '.join(str(list(row)) for row in rows)}: each rank of the job is in "
                'one group, and all are as large; take them from one mesh, such as init_device_mesh("cpu", (2, 2), '
                'mesh_dim_names=("pp", "tp"))["tp"]'
            )
        return Mesh(len(rows), self.size, tuple(zip(*rows, strict=True)))

    def planned(self, plan: Plan, mesh: Mesh) -> Plan:
        """The plan for the ranks of the job.

        Args:
            plan: with tensor ranks, as ``panpipe plan --tp`` writes it; or of the ranks already.
            mesh: of the job.

        Raises:
            RequestError: the plan is for other ranks.
        """
        if plan.mesh.tensor == 1 and plan.mesh.data == self.size and plan.mesh.pipeline == mesh.pipeline:
            return evolve(plan, mesh=mesh)
        if (plan.mesh.pipeline, plan.mesh.data, plan.mesh.tensor) != (mesh.pipeline, 1, self.size):
            raise RequestError(
                f"the plan is for pp={plan.mesh.pipeline},dp={plan.mesh.data},tp={plan.mesh.tensor} and the model's "
                f"DTensors and the ranks of the job are pp={mesh.pipeline},tp={self.size}: plan again with --tp "
                f"{self.size}"
            )
        return evolve(plan, mesh=mesh, prediction=None)

    def check_mesh(self, asked: Mesh | MeshShape | DeviceMesh | None, mesh: Mesh) -> None:
        """Refuse a mesh of the user that is not that of the ranks and of the model's DTensors.

        Args:
            asked: the user's.
            mesh: of the job.

        Raises:
            RequestError: they differ.
        """
        if isinstance(asked, MeshShape):
            given = asked.pipeline, asked.tensor
        elif isinstance(asked, DeviceMesh):
            sizes = dict(zip(asked.mesh_dim_names or (), asked.mesh.shape, strict=False))
            given = sizes.get(PIPELINE), sizes.get(TENSOR)
        else:
            given = (None, None) if asked is None else (asked.pipeline, asked.tensor)
        if given[0] not in (None, mesh.pipeline) or given[1] not in (None, self.size):
            raise RequestError(
                f"mesh is {asked} and the model's DTensors and the ranks of the job are pp={mesh.pipeline},"
                f"tp={self.size}: write that, or leave mesh out"
            )

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """A context in which collectives in programs reach the other tensor ranks."""
        with communicating(GroupCollectives(self.ranks, self.group)):
            yield

    def check(self, compiled: Iterable["Compiled | Example"]) -> None:
        """Refuse programs whose results would differ from those of one process.

        Raises:
            RequestError: with an operator or a buffer.
        """
        for operators in {id(each.operators): each.operators for each in compiled}.values():
            _refuse_draws(operators)

    def check_equal(self, rows: Sequence[Sequence[float]]) -> None:
        """Refuse results that differ between tensor ranks.

        Args:
            rows: loss, weight and metrics of each microbatch, one rank after another.

        Raises:
            RequestError: they differ by more than rounding.
        """
        each = len(rows) // self.size
        for number, row in enumerate(rows):
            first = rows[number % each]
            for place, (value, wanted) in enumerate(zip(row, first, strict=True)):
                near = math.isclose(value, wanted, rel_tol=_NEAR, abs_tol=_NEAR)
                if not near and not (math.isnan(value) and math.isnan(wanted)):
                    what = ("the loss", "the weight")[place] if place < 2 else "a metric"
                    raise RequestError(
                        f"{what} of microbatch {number % each} is {value:g} on tensor rank {number // each} and "
                        f"{wanted:g} on tensor rank 0: layouts must give the step the same results on all of them; use "
                        "output_layouts=Replicate() in the last layer, or loss_parallel; the update was made with them"
                    )

    def refuse(self, what: str) -> NoReturn:
        """Refuse what tensor ranks do not support.

        Args:
            what: the subject and its verb, such as "clip_norm is 1.0".

        Raises:
            RequestError: always.
        """
        raise RequestError(f"{what}: not supported for models with DTensor parameters yet; {_SUPPORTED}")


_SUPPORTED = "use step() with a given or an automatic plan, an elementwise optimizer, and gloo"


def _refuse_draws(operators: Operators) -> None:
    drawing, written = next(iter(operators.first_draw), None), next(iter(operators.step.mutated_buffers), None)
    if drawing is not None:
        raise RequestError(
            f"the step draws random numbers in '{drawing}': tensor ranks would draw others than one process does; set "
            "the rates of dropout to 0, or call model.eval() before panpipe.pipeline"
        )
    if written is not None:
        raise RequestError(f"the step writes the buffer '{written}': tensor ranks have no written buffers yet")


def _refuse_fsdp(model: nn.Module) -> None:
    from torch.distributed.fsdp import FSDPModule

    name = next((name for name, module in model.named_modules() if isinstance(module, FSDPModule)), None)
    if name is not None:
        raise RequestError(
            f"fully_shard was applied to {module_text(name)}: stages have whole layers, without FSDP inside; leave it "
            "out, and let replicas share with shard="
        )


def _refuse_hooks(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise RequestError(
                f"{module_text(name)} has a backward hook: the backward of models with DTensor parameters is derived "
                "from their forward, without hooks; remove it"
            )
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise RequestError(
                f"'{name}' has a gradient hook: the backward of models with DTensor parameters is derived from their "
                "forward, without hooks; remove it"
            )
