"""What a step needs that depends on the shapes of its microbatches: the order of actions, and stages bound to tensors.

    shapes ──▶ programs of each ──▶ messages of each microbatch ──▶ plan with these messages ──▶ actions
                       └──▶ stage runs ──▶ bound instructions, once a device ◀─────────────────────┘

1. A batch with fewer samples than the plan has microbatches runs the plan's first ones.
2. Stages may send each other other messages for another shape. The plan of a step has the messages that any of its
   microbatches has; from its actions those are left out that move nothing for theirs. Both ends leave out the same
   ones, so the order of what is left is one order still, and waits for less.
"""

import gc
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import prod

import torch
from attrs import define, field, frozen
from torch import nn

from ...core.actions import Action, Kind
from ...core.capture.graph.outputs import StepOutputs
from ...core.capture.graph.randomness import random_key
from ...core.costs.costs import StageEdge
from ...core.plan.derive import first_microbatches, reordered, with_edges
from ...core.plan.lowering import Lowered, lower
from ...core.plan.plan import Plan
from ...core.plan.validation.backpressure import choose_ahead_limit
from ...core.plan.validation.progress import AheadLimit
from ...core.plan.validation.validate import validate
from ..batch.batch_agreement import BatchAgreement
from ..batch.lru_cache import LruCache
from ..batch.microbatches import Microbatch, Shape
from ..batch.shapes import Shapes
from ..optimizer.state import StageState
from ..programs.compiled import Compiled
from ..programs.linked_stage import Layout
from ..programs.stage_run import StageRun
from .executor import Bound
from .result_parts import Computed, Part, parts_of

Messages = frozenset[tuple[int, int, bool]]
"""(sender, reader, whether a gradient comes back), of stages."""


@define(eq=False, slots=False)
class Prepared:
    """A step, ready to run.

    Args:
        plan: for its microbatches and messages.
        lowered: what each device issues.
        compiled: for each microbatch.
        runs: device → for each microbatch its stages by index.
        parts: for each microbatch loss, weight, metrics, and numbers in texts, filled up with zeros where another one
            has more of them; None for a weight that is the microbatch's share.
        ahead_limit: how far stages may run ahead of their readers; None for no limit.
        bound: device → its instructions; filled in by the devices.
    """

    plan: Plan
    lowered: Lowered
    compiled: Sequence[Compiled]
    runs: Mapping[int, Sequence[Mapping[int, StageRun]]]
    parts: Sequence[Sequence[Part | None]]
    ahead_limit: AheadLimit | None = None
    bound: dict[int, Bound] = field(factory=dict)

    @cached_property
    def random(self) -> bool:
        """Whether a stage of this process draws random numbers."""
        return any(programs.inputs.random for each in self._distinct for programs in each.programs.values())

    @cached_property
    def loss_dtype(self) -> torch.dtype:
        """Of the loss."""
        first = self.compiled[0].operators
        return first.values[first.step.outputs.home].dtype  # type: ignore[no-any-return]

    @property
    def weighted(self) -> bool:
        """Whether the step returns a weight."""
        outputs = self.compiled[0].operators.step.outputs
        return isinstance(outputs, StepOutputs) and outputs.weight is not None

    @cached_property
    def weights(self) -> list[str | None]:
        """For each microbatch the name of the weight that is computed."""
        return [row[1].name if isinstance(row[1], Computed) else None for row in self.parts]

    @cached_property
    def weight_dtype(self) -> torch.dtype | None:
        """Of a weight that is computed."""
        name = self.weights[0]
        return None if name is None else self.compiled[0].operators.values[name].dtype

    @cached_property
    def metrics(self) -> list[str]:
        """Names of the metrics."""
        outputs = self.compiled[0].operators.step.outputs
        return list(outputs.metrics) if isinstance(outputs, StepOutputs) else []

    @cached_property
    def columns(self) -> int:
        """Parts of a microbatch's result in front of what is written into text: loss, weight, metrics; 0 of a function
        that returns rows."""
        return 2 + len(self.metrics) if isinstance(self.compiled[0].operators.step.outputs, StepOutputs) else 0

    def keys(self, seed: int, index: int, first: int) -> list[torch.Tensor]:
        """Every microbatch's key to its random numbers; one for all where none are drawn.

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


Key = tuple[Shape, ...]
"""The shapes of all microbatches."""


def _key(pieces: Sequence[Microbatch]) -> Key:
    return tuple(piece.shape for piece in pieces)


_STEPS = 16
"""Prepared steps kept: by shapes, and by where in the batch larger microbatches end."""


class Preparations:
    """Prepared steps; those used last are kept, as long as programs for their shapes are.

    Args:
        plan: the pipeline's plan.
        shapes: programs by shape.
        states: stage index → what this process keeps of it.
        model: for buffers that only some shapes read.
    """

    def __init__(self, plan: Plan, shapes: Shapes, states: Mapping[int, StageState], model: nn.Module) -> None:
        self._plan, self._shapes, self._states, self._model = plan, shapes, states, model
        self._runs: dict[Shape, dict[int, StageRun]] = {}
        self._orders: LruCache[tuple[Messages, ...], Orders] = LruCache(_STEPS)
        self._kept: LruCache[Key, Prepared] = LruCache(_STEPS)

    def known(self, pieces: Sequence[Microbatch]) -> bool:
        """Whether what a step of these microbatches needs is kept."""
        return _key(pieces) in self._kept

    def of(self, pieces: Sequence[Microbatch], agreement: BatchAgreement) -> tuple[Prepared, str | None]:
        """What a step of these microbatches needs, and a line for the user where a shape is new.

        Args:
            pieces: the microbatches.
            agreement: of all ranks about this batch.

        Raises:
            RequestError: the plan cannot run them, or another rank was given another batch.
        """
        key = _key(pieces)
        if key not in self._kept:
            agreement.refuse_before()
        compiled, remark = self._shapes.ready(pieces)
        self._let_go()
        prepared = self._kept.use(key)
        if prepared is None:
            orders = self._order([messages_of(each.layout) for each in compiled], compiled)
            place = self._plan.placement
            stages = [self._stage_runs(piece.shape, each) for piece, each in zip(pieces, compiled, strict=True)]
            runs = {
                device: [{i: run for i, run in all_of.items() if place[i] == device} for all_of in stages]
                for device in sorted({place[i] for i in self._states})
            }
            parts = {id(each): parts_of(each, place) for each in compiled}
            longest = max(map(len, parts.values()))
            rows = [parts[id(each)] + [0.0] * (longest - len(parts[id(each)])) for each in compiled]
            prepared = Prepared(orders.plan, orders.lowered, compiled, runs, rows, orders.ahead_limit)
            self._kept.keep(key, prepared)
        return prepared, remark

    def forget(self) -> None:
        """Let go of everything: after a step that broke off, of what it left behind."""
        self._kept.clear()
        self._runs.clear()

    def _let_go(self) -> None:
        gone = [shape for shape in self._runs if shape not in self._shapes]
        for shape in gone:
            del self._runs[shape]
        for key in self._kept if gone else ():
            if any(shape in gone for shape in key):
                self._kept.drop(key)
        if gone:
            gc.collect()  # captured graphs refer to themselves, and what they hold is large

    def _order(self, messages: Sequence[Messages], compiled: Sequence[Compiled]) -> "Orders":
        found = self._orders.use(tuple(messages))
        if found is None:
            found = order_of(self._plan, [each.layout for each in compiled])
            self._orders.keep(tuple(messages), found)
        return found

    def _stage_runs(self, shape: Shape, compiled: Compiled) -> dict[int, StageRun]:
        if shape not in self._runs:
            step = compiled.operators.step
            for index, programs in compiled.programs.items():
                own = self._states[index].buffers
                for name in programs.inputs.buffers:
                    if name not in own:  # one that nothing writes, or its stage would have had it before
                        own[name] = self._model.get_buffer(name).to(self._states[index].device)
            again = self._plan.memory.recompute
            constants, loss = step.constants, step.outputs.home
            self._runs[shape] = {
                i: StageRun(i, programs, compiled.layout, self._states[i], constants, loss, i in again, step.gradients)
                for i, programs in compiled.programs.items()
            }
        return self._runs[shape]


def messages_of(layout: Layout) -> Messages:
    """Which stages talk."""
    return frozenset((*pair, any(t.differentiable for t in tensors)) for pair, tensors in layout.items())


@frozen
class Orders:
    """A plan for some microbatches, and what its devices issue.

    Args:
        plan: with their messages.
        lowered: without what moves nothing for them.
        ahead_limit: how far stages may run ahead of their readers; None for no limit.
    """

    plan: Plan
    lowered: Lowered
    ahead_limit: AheadLimit | None


def order_of(plan: Plan, layouts: Sequence[Layout]) -> Orders:
    """The plan for these microbatches, and what its devices issue.

    Args:
        plan: the plan, sound; microbatches beyond the given ones are left out.
        layouts: for each microbatch the tensors of every message.

    Raises:
        RequestError: with these messages the order of the plan's actions is not sound.
    """
    wanted = with_edges(first_microbatches(plan, len(layouts)), _edges(layouts))
    if wanted.forward_only and wanted is not plan:
        wanted = reordered(wanted)
    lowered = lower(wanted)
    if plan.mesh.data > 1 and not plan.forward_only and wanted.microbatches < plan.microbatches:
        lowered = _reduced_in_order(lowered, lower(plan))
    if wanted is not plan:
        validate(wanted, lowered=lowered)
    found = [messages_of(layout) for layout in layouts]
    moving = tuple(tuple(a for a in actions if _moves_something(a, found)) for actions in lowered)
    return Orders(wanted, moving, choose_ahead_limit(wanted, lowered) if wanted.forward_only else None)


def _reduced_in_order(lowered: Lowered, whole: Lowered) -> Lowered:
    """Reductions over replicas behind everything else, in the order that the whole plan has them.

    Another replica may have more microbatches in this step, and all of them reduce in one order.
    """
    found = []
    for actions, reference in zip(lowered, whole, strict=True):
        reductions = [action for action in reference if action.kind is Kind.REDUCE_GRAD]
        others = [action for action in actions if action.kind is not Kind.REDUCE_GRAD]
        end = next((i for i, action in enumerate(others) if action.microbatch is None), len(others))
        found.append((*others[:end], *reductions, *others[end:]))
    return tuple(found)


def _edges(layouts: Sequence[Layout]) -> list[StageEdge]:
    """The messages that any of the microbatches has, by the largest; at least a byte, and a gradient's, too."""
    edges: dict[tuple[int, int], StageEdge] = {}
    for layout in {id(layout): layout for layout in layouts}.values():
        for pair, tensors in layout.items():
            known = edges.get(pair, StageEdge(*pair, 1, 0))
            sizes = [(prod(t.shape) * t.dtype.itemsize, t.differentiable) for t in tensors]
            back = max(1, sum(size for size, gradient in sizes if gradient)) if any(g for _, g in sizes) else 0
            edges[pair] = StageEdge(
                *pair, max(known.bytes, sum(size for size, _ in sizes)), max(known.gradient_bytes, back)
            )
    return list(edges.values())


def _moves_something(action: Action, messages: Sequence[Messages]) -> bool:
    if action.peer is None or action.microbatch is None:
        return True
    ends = (action.stage, action.peer) if action.kind in (Kind.SEND_F, Kind.RECV_B) else (action.peer, action.stage)
    back = action.kind in (Kind.SEND_B, Kind.RECV_B)
    here = messages[action.microbatch]
    return (*ends, True) in here or (not back and (*ends, False) in here)
