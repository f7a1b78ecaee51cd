"""Two stages of a small network, bound to tensors, and one device's executor: for tests that drive parts by hand."""

import copy
import functools
from collections.abc import Sequence

import torch
from attrs import define, field
from panpipe.backends.contract import Backend
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.capture.graph.randomness import random_key
from panpipe.core.plan.plan import Plan
from panpipe.runtimes.devices.compute import ComputeQueue
from panpipe.runtimes.engine.executor import Executor
from panpipe.runtimes.engine.step_data import StepInputs
from panpipe.runtimes.engine.step_graphs import GraphWrapping
from panpipe.runtimes.engine.tied import TiedReduction
from panpipe.runtimes.microbatches import Microbatch, split_batch
from panpipe.runtimes.programs.compiled import Compiled, compile_stages
from panpipe.runtimes.programs.graphs.graph_pool import CudaGraphPool
from panpipe.runtimes.programs.stage_run import StageRun
from panpipe.runtimes.update.stage_state import StageState
from panpipe.runtimes.update.update import NormParameters, Update
from torch import Tensor, nn

WIDTH, ROWS = 8, 4
RATE = 0.5
KEY = random_key(0, 0, 0)


def _step(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).pow(2).mean()


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


@functools.cache
@torch.enable_grad()
def _compiled() -> Compiled:
    """The programs of both stages; they hold no parameter."""
    operators = operators_of(capture_step(_network(), _step, torch.zeros(ROWS // 2, WIDTH)))
    names = [node.name for node in operators.graph.nodes]
    return compile_stages(operators, [names[:2], names[2:]], range(2))


@define
class TwoStages:
    """``Linear, Tanh │ Linear, loss``, for microbatches of two rows.

    Args:
        recompute: the stages that recompute.
        gradients: whether backwards follow.
    """

    recompute: Sequence[int] = ()
    gradients: bool = True
    model: nn.Sequential = field(init=False)
    compiled: Compiled = field(init=False)
    states: dict[int, StageState] = field(init=False)
    runs: dict[int, StageRun] = field(init=False)
    pieces: list[Microbatch] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.model, self.compiled = _network(), _compiled()
        self.pieces = split_batch(torch.randn(ROWS, WIDTH), 2)
        step = self.compiled.operators.step
        parameters = dict(self.model.named_parameters())
        self.states, self.runs = {}, {}
        for i, programs in self.compiled.programs.items():
            own = {name: parameters[name] for name in programs.inputs.parameters}
            self.states[i] = StageState(own, {}, lambda groups: torch.optim.SGD(groups, lr=RATE))
            self.runs[i] = StageRun(
                i, programs, self.compiled.layout, self.states[i], step.constants, step.outputs.main_result,
                i in self.recompute, self.gradients,
            )  # fmt: skip

    @torch.enable_grad()
    def alone(self) -> nn.Module:
        """A copy of the model with the gradients of the whole batch, from autograd in one process."""
        model = copy.deepcopy(self.model)
        model.zero_grad()
        for piece in self.pieces:
            (_step(model, piece.batch) * piece.weight).backward()
        return model

    def inputs(self, clear_gradients: bool = True) -> StepInputs:
        """What a step of both microbatches works on."""
        seeds, count = torch.tensor([piece.weight for piece in self.pieces]), len(self.pieces)
        return StepInputs(self.pieces, [KEY] * count, seeds, [None] * count, clear_gradients=clear_gradients)

    def executor(
        self, plan: Plan, backend: Backend, queue: ComputeQueue | None = None, pool: CudaGraphPool | None = None
    ) -> Executor:
        """One device's executor."""
        own = {stage.index: self.states[stage.index] for stage in plan.stages_on(backend.device)}
        update = Update(plan, own, NormParameters(()), None, torch.device("cpu"))
        wrapping = None if pool is None else GraphWrapping(pool, torch.device("cpu"))
        return Executor(plan, backend, queue or ComputeQueue(), TiedReduction(plan, {}), update, wrapping=wrapping)

    def on(self, plan: Plan, device: int) -> list[dict[int, StageRun]]:
        """For each microbatch a device's stages by index."""
        return [{i: run for i, run in self.runs.items() if plan.placement[i] == device} for _ in self.pieces]
