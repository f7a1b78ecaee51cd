"""What a step needs that depends on its microbatches and on the Python values that it reads: actions bound to tensors.

    current values ──▶ known? ──▶ programs of each shape ──▶ messages of each microbatch ──▶ `lowered_plan` ──▶ actions
                         │                  └──▶ stage runs ──▶ bound instructions, once a device ◀───────────────┘
                         └─ no ──▶ captured again, the plan's cut carried over                             (shapes.py)

Prepared steps are cached by these values and by the shapes of all microbatches. A return to earlier values captures
nothing. Ranks whose values changed compare the changes before they continue: a rank that captures alone would wait for
the others.
"""

import gc
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from attrs import define, field, frozen
from torch import nn

from ...core.capture.graph.outputs import StepOutputs
from ...core.capture.graph.randomness import random_key
from ...core.capture.python.guards import Guards
from ...core.errors import RequestError
from ...core.logs import LOGGER
from ...core.plan.plan import Plan
from ..batch.batch_agreement import BatchAgreement, ChangedValues
from ..batch.lru_cache import LruCache
from ..batch.shapes import Shapes
from ..microbatches import Microbatch, Shape
from ..offload.offloads import offloaded_storages
from ..programs.compiled import Compiled
from ..programs.stage_run import SharedTensors, StageRun
from ..update.stage_state import StageState
from .executor import BoundActions
from .lowered_plan import LoweredPlan, MessagePairs, lowered_plan, message_pairs


@frozen
class Computed:
    """A number of the step's result, for one microbatch.

    Args:
        device: the device that computes it.
    """

    name: str
    device: int


Part = Computed | float
"""A number that a device computes, or a constant of the step."""

LOSS, WEIGHT = 0, 1
"""Positions of a microbatch's loss and weight among its parts."""


def parts_of(compiled: Compiled, placement: Sequence[int]) -> list[Part | None]:
    """The parts of a microbatch's result: loss, weight, metrics; none for a function that returns rows.

    The weight is None if the step returns none.

    Args:
        placement: stage → device.
    """
    outputs, nodes = compiled.operators.step.outputs, compiled.operators.nodes

    def part(value: Any) -> Part | None:
        if isinstance(value, str) and value in nodes:
            return Computed(value, placement[compiled.stage_of(value)])
        return float(value) if isinstance(value, int | float) else None

    if not isinstance(outputs, StepOutputs):
        return []
    return [part(outputs.loss), part(outputs.weight), *(part(value) or 0.0 for value in outputs.metrics.values())]


@define(eq=False, slots=False)
class Prepared:
    """A step that is ready to run.

    Args:
        lowered: the plan for its microbatches and messages, and its lowered actions.
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


KEPT = 8
"""Number of variants of a step whose programs are kept, each for several shapes."""
_STEPS = 16
"""Number of prepared steps kept of a variant: they differ by shapes, and by which microbatches have a sample more."""

_LONG_S = 1.0
"""Seconds of captures after which their garbage is collected at once: it is a fifth of all objects, and the collection
would take up to half a second in a later step."""

Agree = Callable[[bool, ChangedValues | None], BatchAgreement]
"""Starts to compare a batch between ranks: whether its programs are known here, and which value changed."""


@define(eq=False)
class _Variant:
    """The step with certain Python values.

    Args:
        shapes: its programs by shape; they are kept as long as prepared steps use them.
        ready: whether a capture with these values has succeeded.
        capture_s: seconds of captures when unused shapes were dropped last.
    """

    reads: Guards
    shapes: Shapes
    shared: Mapping[int, SharedTensors]
    ready: bool = False
    capture_s: float = 0.0
    runs: dict[Shape, dict[int, StageRun]] = field(factory=dict)
    steps: LruCache[Key, Prepared] = field(factory=lambda: LruCache(_STEPS))


class PreparedSteps:
    """A cache of prepared steps, by the Python values that the step reads and the shapes of microbatches.

    Args:
        plan: returns the plan that runs now. Plans of one pipeline differ in the orders of actions alone.
        shapes: creates the programs by shape of one variant, from a key of its Python values.
        devices: of this process; one without a stage has no part in compute, and takes part in what all devices share.
        changed: called when something of the model changed, before its values are read again.
    """

    def __init__(
        self,
        model: nn.Module,
        step: Any,
        plan: Callable[[], Plan],
        shapes: Callable[[Hashable], Shapes],
        states: Mapping[int, StageState],
        devices: Sequence[int],
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._model, self._step, self._plan, self._new_shapes = model, step, plan, shapes
        self._states, self._devices, self._changed = states, devices, changed
        self._lowered: LruCache[tuple[str, tuple[MessagePairs, ...]], LoweredPlan] = LruCache(_STEPS)
        self._kept: LruCache[Hashable, _Variant] = LruCache(KEPT)
        self._now = self._variant(Guards(model, step))
        self._now.ready = True
        self._kept.keep(self._now.reads.key, self._now)
        self._reported: set[str] = set()

    def _variant(self, reads: Guards) -> _Variant:
        return _Variant(reads, self._new_shapes(reads.key), {index: SharedTensors() for index in self._states})

    @property
    def key(self) -> Hashable:
        """A key of the Python values that the step reads now."""
        return Guards(self._model, self._step).key

    @property
    def shapes(self) -> Shapes:
        """The programs of the variant that was used last."""
        return self._now.shapes

    def of(self, pieces: Sequence[Microbatch], agree: Agree) -> tuple[Prepared, BatchAgreement, str | None]:
        """The prepared step of these microbatches, with the current values.

        Args:
            agree: starts to compare this batch between ranks.

        Returns:
            The prepared step, the comparison, and a line for the user if a shape is new.

        Raises:
            RequestError: the step cannot be captured with these values, or the plan cannot run it, or another rank has
                another batch or other values.
        """
        key = _key(self._plan(), pieces)
        if self._now.reads.unchanged():
            agreement = agree(key in self._now.steps, None)
            prepared, remark = self._step_of(self._now, key, pieces, agreement)
            return prepared, agreement, remark
        self._changed()
        reads, before = Guards(self._model, self._step), self._now
        found = self._kept.use(reads.key) or self._variant(reads)
        found.reads = reads  # equal values, but they may be other objects
        places = list(reads.others(before.reads))
        place = places[0] if places else None
        change = None if place is None else ChangedValues(reads.digest(places), _change(place, before.reads, reads))
        agreement = agree(change is None and key in found.steps, change)
        if change is not None:
            agreement.refuse_before_run()
        try:
            prepared, remark = self._step_of(found, key, pieces, agreement)
        except RequestError as error:
            if found.ready or place is None:
                raise
            raise RequestError(
                f"{_change(place, before.reads, reads)}, and the step captured again: {error}"
            ) from error
        self._now = found
        if not found.ready:
            found.ready = True
            self._kept.keep(found.reads.key, found)
            if place is not None and place not in self._reported:
                self._reported.add(place)
                LOGGER.warning(
                    "%s: the step is captured again for each new value, and programs are kept for %d: if it often "
                    "changes, give it with the batch as a tensor, or make it a buffer",
                    _change(place, before.reads, reads), KEPT,
                )  # fmt: skip
        return prepared, agreement, remark

    def _step_of(
        self, variant: _Variant, key: Key, pieces: Sequence[Microbatch], agreement: BatchAgreement
    ) -> tuple[Prepared, str | None]:
        """The step of these microbatches, and a line for the user if it needs a new shape; errors as of `of`."""
        if key not in variant.steps:
            agreement.refuse_before_run()
        compiled, remark = variant.shapes.programs_for(pieces)
        _drop_evicted_shapes(variant)
        prepared = variant.steps.use(key)
        if prepared is None:
            prepared = self._prepare(variant, pieces, compiled)
            variant.steps.keep(key, prepared)
        return prepared, remark

    def forget(self) -> None:
        """Drop all prepared steps; after a failed step, whose messages and saved tensors must not reach the next."""
        for variant in self._kept.values():
            variant.steps.clear()
            variant.runs.clear()
            for shared in variant.shared.values():
                shared.free()

    def _prepare(self, variant: _Variant, pieces: Sequence[Microbatch], compiled: Sequence[Compiled]) -> Prepared:
        lowered, place = self._lower(compiled), self._plan().placement
        stages = [self._stage_runs(variant, piece.shape, each) for piece, each in zip(pieces, compiled, strict=True)]
        runs = {
            device: [{i: run for i, run in all_of.items() if place[i] == device} for all_of in stages]
            for device in self._devices
        }
        parts = {id(each): parts_of(each, place) for each in compiled}
        return Prepared(lowered, compiled, runs, [parts[id(each)] for each in compiled])

    def _lower(self, compiled: Sequence[Compiled]) -> LoweredPlan:
        plan = self._plan()
        key = plan.hash, tuple(message_pairs(each.layout) for each in compiled)
        found = self._lowered.use(key)
        if found is None:
            found = lowered_plan(plan, [each.layout for each in compiled])
            self._lowered.keep(key, found)
        return found

    def _stage_runs(self, variant: _Variant, shape: Shape, compiled: Compiled) -> dict[int, StageRun]:
        if shape not in variant.runs:
            for index, programs in compiled.programs.items():
                own = self._states[index].buffers
                for name in programs.inputs.buffers:
                    if name not in own:  # no stage writes it: written buffers are in the states from the start
                        own[name] = self._model.get_buffer(name).to(self._states[index].device)
            plan = self._plan()
            variant.runs[shape] = {
                i: StageRun(
                    i, compiled, self._states[i], i in plan.memory.recompute, offloaded_storages(plan, i, compiled),
                    variant.shared[i],
                )
                for i in compiled.programs
            }  # fmt: skip
        return variant.runs[shape]


def _drop_evicted_shapes(variant: _Variant) -> None:
    gone = [shape for shape in variant.runs if shape not in variant.shapes]
    for shape in gone:
        del variant.runs[shape]
    for key in list(variant.steps) if gone else ():
        if any(shape in gone for shape, _ in key[1]):
            del variant.steps[key]
    before, variant.capture_s = variant.capture_s, variant.shapes.capture_s
    if variant.capture_s - before > (0 if gone else _LONG_S):
        gc.collect()  # captured graphs contain reference cycles, and their tensors are large


def _change(place: str, before: Guards, now: Guards) -> str:
    return f"{now.line(place)}: the step reads '{place}', which was {before.text(place)} and is {now.text(place)}"
