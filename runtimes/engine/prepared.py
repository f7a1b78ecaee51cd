"""What a step needs that depends on the shapes of its microbatches: lowered actions, and stages bound to tensors.

    shapes ──▶ programs of each ──▶ messages of each microbatch ──▶ `lowered_plan` ──▶ actions
                       └──▶ stage runs ──▶ bound instructions, once a device ◀───────────┘

The results are cached by the shapes of all microbatches.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch
from attrs import define, field
from torch import nn

from ...core.capture.graph.outputs import StepOutputs
from ...core.capture.graph.randomness import random_key
from ...core.plan.plan import Plan
from ..batch.batch_agreement import BatchAgreement
from ..batch.lru_cache import LruCache
from ..batch.microbatches import Microbatch, Shape
from ..batch.shapes import Shapes
from ..offload.offloadable import offloaded_storages
from ..optimizer.stage_state import StageState
from ..programs.compiled import Compiled
from ..programs.shared_tensors import SharedTensors
from ..programs.stage_run import StageRun
from .executor import BoundActions
from .lowered_plan import LoweredPlan, MessagePairs, lowered_plan, message_pairs
from .result_parts import Computed, Part, parts_of


@define(eq=False, slots=False)
class Prepared:
    """A step that is ready to run.

    Args:
        lowered: the plan for its microbatches and messages, and its lowered actions.
        compiled: the programs of each microbatch.
        runs: device → for each microbatch its stages by index.
        parts: for each microbatch loss, weight and metrics; None for a weight that is the microbatch's share.
        bound: device → its instructions; each device adds its own.
    """

    lowered: LoweredPlan
    compiled: Sequence[Compiled]
    runs: Mapping[int, Sequence[Mapping[int, StageRun]]]
    parts: Sequence[Sequence[Part | None]]
    bound: dict[int, BoundActions] = field(factory=dict)

    @property
    def plan(self) -> Plan:
        """The plan for its microbatches and messages."""
        return self.lowered.plan

    @cached_property
    def random(self) -> bool:
        """Whether a stage of this process draws random numbers."""
        return any(programs.inputs.random for each in self._distinct for programs in each.programs.values())

    @cached_property
    def loss_dtype(self) -> torch.dtype:
        """The dtype of the loss."""
        first = self.compiled[0].operators
        return first.values[first.step.outputs.main_result].dtype  # type: ignore[no-any-return]

    @property
    def weighted(self) -> bool:
        """Whether the step returns a weight."""
        outputs = self.compiled[0].operators.step.outputs
        return isinstance(outputs, StepOutputs) and outputs.weight is not None

    @cached_property
    def weights(self) -> list[str | None]:
        """For each microbatch the name of its weight; None if no device computes one."""
        return [row[1].name if isinstance(row[1], Computed) else None for row in self.parts]

    @cached_property
    def weight_dtype(self) -> torch.dtype | None:
        """The dtype of a computed weight; None if no device computes one."""
        name = self.weights[0]
        return None if name is None else self.compiled[0].operators.values[name].dtype

    @cached_property
    def metrics(self) -> list[str]:
        """Names of the metrics."""
        outputs = self.compiled[0].operators.step.outputs
        return list(outputs.metrics) if isinstance(outputs, StepOutputs) else []

    def keys(self, seed: int, index: int, first: int) -> list[torch.Tensor]:
        """The random key of each microbatch; the same one for all if nothing is drawn.

        Args:
            seed: of all random numbers.
            index: of the step.
            first: number of the first microbatch among those of all replicas.
        """
        count = len(self.compiled)
        if not self.random:
            return [random_key(seed, index, 0)] * count
        return [random_key(seed, index, first + m) for m in range(count)]

    @property
    def _distinct(self) -> Sequence[Compiled]:
        return list({id(each): each for each in self.compiled}.values())


Key = tuple[str, tuple[tuple[Shape, int], ...]]
"""The hash of the plan, and the shapes of all microbatches: runs of equal ones, each with its length. So a step
compares few shapes."""


def _key(plan: Plan, pieces: Sequence[Microbatch]) -> Key:
    runs: list[tuple[Shape, int]] = []
    for piece in pieces:
        shape = piece.shape
        if runs and (runs[-1][0] is shape or runs[-1][0] == shape):
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((shape, 1))
    return plan.hash, tuple(runs)


_STEPS = 16
"""Number of prepared steps kept: they differ by shapes, and by which microbatches have a sample more."""


class PreparedSteps:
    """A cache of prepared steps: those used last are kept, as long as the programs for their shapes are.

    Args:
        present: returns the plan that runs now. Plans of one pipeline differ in the orders of actions alone.
        shapes: programs by shape.
        states: stage index → its parameters and buffers in this process.
        model: the source of buffers that only some shapes read.
        devices: of this process; one without a stage has no part in compute, and takes part in what all devices share.
    """

    def __init__(
        self,
        present: Callable[[], Plan],
        shapes: Shapes,
        states: Mapping[int, StageState],
        model: nn.Module,
        devices: Sequence[int],
    ) -> None:
        self._present, self._shapes, self._states, self._model = present, shapes, states, model
        self._devices, self._captures = devices, 0
        self._runs: dict[Shape, dict[int, StageRun]] = {}
        self._shared = {index: SharedTensors() for index in states}
        self._lowered: LruCache[tuple[str, tuple[MessagePairs, ...]], LoweredPlan] = LruCache(_STEPS)
        self._kept: LruCache[Key, Prepared] = LruCache(_STEPS)

    def known(self, pieces: Sequence[Microbatch]) -> bool:
        """Whether the cache has the step of these microbatches."""
        return _key(self._present(), pieces) in self._kept

    def of(self, pieces: Sequence[Microbatch], agreement: BatchAgreement) -> tuple[Prepared, str | None]:
        """The step of these microbatches, and a line for the user if it needs a new shape.

        Args:
            pieces: the microbatches.
            agreement: compares this batch between all ranks.

        Raises:
            RequestError: the plan cannot run them, or another rank has another batch.
        """
        key = _key(self._present(), pieces)
        if key not in self._kept:
            agreement.refuse_before_run()
        compiled, remark = self._shapes.programs_for(pieces)
        self._drop_evicted_shapes()
        prepared = self._kept.use(key)
        if prepared is None:
            prepared = self._prepare(pieces, compiled)
            self._kept.keep(key, prepared)
        return prepared, remark

    def forget(self) -> None:
        """Drop everything; after a failed step, whose messages and saved tensors must not reach the next one."""
        self._kept.clear()
        self._runs.clear()
        for shared in self._shared.values():
            shared.free()

    def _prepare(self, pieces: Sequence[Microbatch], compiled: Sequence[Compiled]) -> Prepared:
        lowered = self._lower([message_pairs(each.layout) for each in compiled], compiled)
        place = self._present().placement
        stages = [self._stage_runs(piece.shape, each) for piece, each in zip(pieces, compiled, strict=True)]
        runs = {
            device: [{i: run for i, run in all_of.items() if place[i] == device} for all_of in stages]
            for device in self._devices
        }
        parts = {id(each): parts_of(each, place) for each in compiled}
        return Prepared(lowered, compiled, runs, [parts[id(each)] for each in compiled])

    def _drop_evicted_shapes(self) -> None:
        gone = [shape for shape in self._runs if shape not in self._shapes]
        for shape in gone:
            del self._runs[shape]
        for key in self._kept if gone else ():
            if any(shape in gone for shape, _ in key[1]):
                self._kept.drop(key)
        before, self._captures = self._captures, self._shapes.captures
        if gone and before != self._captures:
            gc.collect()  # captured graphs contain reference cycles, and their tensors are large

    def _lower(self, pairs: Sequence[MessagePairs], compiled: Sequence[Compiled]) -> LoweredPlan:
        plan = self._present()
        key = plan.hash, tuple(pairs)
        found = self._lowered.use(key)
        if found is None:
            found = lowered_plan(plan, [each.layout for each in compiled])
            self._lowered.keep(key, found)
        return found

    def _stage_runs(self, shape: Shape, compiled: Compiled) -> dict[int, StageRun]:
        if shape not in self._runs:
            step = compiled.operators.step
            for index, programs in compiled.programs.items():
                own = self._states[index].buffers
                for name in programs.inputs.buffers:
                    if name not in own:  # no stage writes it: written buffers are in the states from the start
                        own[name] = self._model.get_buffer(name).to(self._states[index].device)
            plan = self._present()
            constants, loss = step.constants, step.outputs.main_result
            self._runs[shape] = {
                i: StageRun(
                    i, programs, compiled.layout, self._states[i], constants, loss, i in plan.memory.recompute,
                    step.gradients,
                    offloaded_storages(plan, i, compiled), compiled.runs_python(i), self._shared[i],
                )
                for i, programs in compiled.programs.items()
            }  # fmt: skip
        return self._runs[shape]
