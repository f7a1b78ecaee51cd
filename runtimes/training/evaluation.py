"""Forwards without backwards: evaluation, and other functions of a model and a batch.

    step or function, modes of the modules
      │ captured again, without gradients                          (core/capture/export/step.py)
      ▼ the plan's cut carried over                                (core/capture/export/carry_over.py)
    stages with F only, on the trained parameters
      │ an order with F only, lowered, validated                   (core/lowering/derive.py)
      ▼
    the same executors as in training

They change nothing: no parameter, gradient, buffer or count of steps. They have their own streams of random numbers.
Modules compute in their current modes, as in plain PyTorch.
"""

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any
from zlib import crc32

import torch
from attrs import frozen

from ...core.capture.batch.find_batch_dims import RowTracer
from ...core.capture.export.captured_step import CapturedStep
from ...core.capture.export.carry_over import Cut
from ...core.capture.export.step import capture_step
from ...core.capture.graph.outputs import ResultRows
from ...core.capture.regions.breaks import StepFunction
from ...core.errors import RequestError
from ...core.lowering.derive import forward_only
from ...core.plan.plan import Plan
from ...core.wording import module_text
from ..batch.example import ModuleModes
from ..batch.lru_cache import LruCache
from ..batch.shapes import Dims, Shapes, VaryingSizes
from ..engine.prepared import PreparedSteps
from ..engine.results import Batch
from ..engine.step_data import StepInputs, StepOptions
from ..engine.workers import Workers
from ..launch.progress import Report
from ..microbatches import Microbatch, Shape
from ..programs.stage_compiler import StageCompiler, planned_compiler
from ..weights.remote_tensors import as_meta_tensors
from .local_stages import LocalStages
from .state import PipelineState

KEPT = 4
"""Number of functions and modes whose programs are kept, each for several shapes."""


@frozen
class ForwardFunction:
    """A function that is run forward only.

    Args:
        rows: whether it returns tensors with a row for each sample, and no loss.
        everywhere: whether every process gets the rows.
    """

    function: StepFunction
    rows: bool = False
    everywhere: bool = True


class Evaluator:
    """Runs forwards on the stages of a pipeline.

    Args:
        state: of the pipeline; the number of evaluations selects their random numbers.
        compiler: compiles sections of programs; None to run operators one by one.
        report: called with what is captured, if it takes long.
        changed: called when something of the model changed.
        varying: the sizes that differ between batches, in training and here.
    """

    def __init__(
        self,
        stages: LocalStages,
        cut: Cut,
        workers: Workers,
        state: PipelineState,
        compiler: StageCompiler | None,
        report: Report,
        changed: Callable[[], None],
        varying: VaryingSizes,
    ) -> None:
        self._stages, self._cut, self._workers, self._state = stages, cut, workers, state
        self._compiler, self._report, self._changed, self._varying = compiler, report, changed, varying
        self._model, self._plan, self._team = stages.model, stages.plan, stages.team
        self._modes = ModuleModes(stages.team.tensors.whole_model(stages.model))
        self._kept: LruCache[Any, PreparedSteps] = LruCache(KEPT)

    @cached_property
    def _forward_plan(self) -> Plan:
        """The plan of the forwards."""
        return forward_only(self._plan)

    def parameters(self) -> AbstractContextManager[None]:
        """A context for evaluations: parameters that replicas share are whole, if the plan does not gather them."""
        return nullcontext() if self._forward_plan.memory.unshard else self._stages.whole_parameters()

    def run(self, forwards: ForwardFunction, pieces: list[Microbatch], trace: bool) -> Batch:
        """Run forwards on a batch.

        Args:
            trace: whether every action and the saved tensors are recorded.

        Raises:
            RequestError: the function cannot be captured, or the plan cannot run it, or ranks are in different modes or
                were given different batches.
            WorkerError: a worker stopped.
        """
        self._check_agreed()
        steps, most, unchanged = self._steps(forwards), self._plan.microbatches, "nothing was changed"
        batch = Batch(steps, pieces, most, self._team, self._workers.queues, forwards.everywhere)
        self._stages.clamp(batch.captured)
        self._workers.run(batch, self._inputs(batch), StepOptions(False, trace), unchanged)
        batch.agreement.refuse(unchanged)
        self._state.evaluations += 1
        return batch

    def _steps(self, forwards: ForwardFunction) -> PreparedSteps:
        """The prepared steps of a function in the current modes of the modules."""
        key = forwards.function, forwards.rows, self._modes.now()
        found = self._kept.use(key)
        if found is None:
            self._changed()  # its values are read now, and tensors may have been replaced before
            capture = partial(self._captured, forwards)
            compiler = planned_compiler(self._compiler, self._forward_plan)

            def shapes(reads: Hashable) -> Shapes:
                where, report = self._stages.where, self._report
                return Shapes(capture, self._team, self._cut, where, compiler, self._varying, (key, reads), report)

            states, local = self._stages.states, self._team.local
            found = PreparedSteps(
                self._model, forwards.function, lambda: self._forward_plan, shapes, states, local, self._changed
            )
            self._kept.keep(key, found)
        return found

    def _captured(
        self, forwards: ForwardFunction, batch: Any, shape: Shape, symbolic: Dims | None = None
    ) -> CapturedStep:
        kind = next(iter(self._team.where.values())).type  # of a device without a stage too
        with as_meta_tensors(self._model):
            rows = None
            if forwards.rows:
                tracer = RowTracer(self._model, forwards.function, batch, False)
                found = tracer.trace(shape.dims)
                rows = ResultRows(shape.samples, None if found.error else found.results)
            return capture_step(
                self._model, forwards.function, batch, device=kind, gradients=False, rows=rows, symbolic=symbolic
            )

    def _check_agreed(self) -> None:
        """Refuse ranks whose modules are in different modes: their stages would be parts of different models."""
        team, now = self._team, self._modes.now()
        if len(team.local) == team.size or len(set(team.in_replica(lambda _: crc32(bytes(now))))) == 1:
            return
        modes, first = team.in_replica(lambda _: now), team.replica * team.size
        for device, other in enumerate(modes):
            name = self._modes.first_other(modes[0], other)
            if name is not None:
                raise RequestError(
                    f"{module_text(name)} is in another mode on rank {team.rank(first + device)} than on rank "
                    f"{team.rank(first)}: all ranks must evaluate in the same mode; call model.eval() on every "
                    "rank"
                )

    def _inputs(self, batch: Batch) -> StepInputs:
        # Steps count up from 0, evaluations down from -1, so that they never draw the same random numbers.
        self._team.tensors.check(batch.prepared.compiled)
        first, index, pieces = self._team.batch * self._plan.microbatches, -1 - self._state.evaluations, batch.pieces
        joined = batch.joined
        return StepInputs(
            pieces, batch.prepared.keys(self._state.seed, index, first), torch.zeros(len(pieces)), [None] * len(pieces),
            clear_gradients=False, store_result=None if joined is None else joined.store,
        )  # fmt: skip
