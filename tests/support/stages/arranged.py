"""A small network over threads of this process: the parts of a trainer, for tests that drive one of them."""

import copy
import functools

import torch
from attrs import define, evolve, field
from panpipe.core.lowering.derive import synchronised
from panpipe.core.plan.plan import Plan
from panpipe.runtimes.batch.example import Example
from panpipe.runtimes.engine.workers import Workers
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.microbatches import Microbatch, split_batch
from panpipe.runtimes.optimizer.training import Training
from panpipe.runtimes.programs.compiled import Programs
from panpipe.runtimes.programs.options import ProgramOptions
from panpipe.runtimes.training.plan_setup import PlanSetup, set_up_plan
from panpipe.runtimes.training.state import PipelineState
from torch import Tensor, nn

from ..cuts import captured_once, even_plan
from ..models import Case

WIDTH, ROWS, MICROBATCHES = 8, 4, 2
RATE = 0.5
SGD = functools.partial(torch.optim.SGD, lr=RATE)


def _network(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    return model.to(dtype)


def step(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).pow(2).mean()


CASE = Case(_network, step, lambda rows, dtype: torch.randn(rows, WIDTH, dtype=dtype))


@functools.cache
def _programs(devices: int) -> Programs:
    return {}


@define
class Arranged:
    """``Linear, BatchNorm, Tanh, Linear, loss`` in as many stages as there are threads, with SGD.

    Args:
        training: in addition to SGD.
        devices: number of threads.
        on_meta: whether the model has no values yet.

    Attributes:
        model: the user's.
        plan, team, parts: of the trainer; values are not loaded yet.
    """

    training: Training = field(factory=Training)
    devices: int = 2
    on_meta: bool = False
    model: nn.Module = field(init=False)
    plan: Plan = field(init=False)
    team: ThreadTeam = field(init=False)
    parts: PlanSetup = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.model, self.team = CASE.model(torch.float32), ThreadTeam(self.devices)
        if self.on_meta:
            self.model = self.model.to("meta")
        operators = captured_once(CASE, torch.float32, ROWS, MICROBATCHES)
        self.plan = even_plan(operators, self.devices, MICROBATCHES)
        training = evolve(self.training, optimizer=SGD)
        if training.needs_all_stages:
            self.plan = synchronised(self.plan)
        example = Example(self.model, step, self.pieces()[0], operators)
        options = ProgramOptions(known=_programs(self.devices))
        self.parts = set_up_plan(example, self.plan, self.team, training, PipelineState(), options, lambda: None)

    @property
    def workers(self) -> Workers:
        """The devices."""
        return self.parts.workers

    def pieces(self, seed: int = 0, rows: int = ROWS) -> list[Microbatch]:
        """The microbatches of a batch."""
        generator = torch.Generator().manual_seed(seed)
        return split_batch(torch.randn(rows, WIDTH, generator=generator), MICROBATCHES)

    @torch.enable_grad()
    def alone(self, pieces: list[Microbatch]) -> tuple[nn.Module, float]:
        """A copy of the model with the gradients of a batch, from autograd in one process; and the loss."""
        model, total = copy.deepcopy(self.model), 0.0
        model.zero_grad()
        for piece in pieces:
            loss = step(model, piece.batch) * piece.weight
            loss.backward()
            total += loss.item()
        return model, total
