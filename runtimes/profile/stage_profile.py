"""Measures the costs of the programs of stages on the device at hand.

All devices measure at the same time, because they share memory bandwidth and caches.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...core.capture.export.operators import Operators
from ...core.capture.graph.randomness import random_key
from ...core.capture.graph.storages import storage_sizes
from ...core.capture.programs.stage import Boundary
from ...core.capture.programs.stage_programs import StagePrograms
from ...core.costs.costs import StageCosts
from ..devices.compute import Stopwatch, compute_device
from ..optimizer.optimizers import OptimizerFactory
from ..optimizer.stage_state import StageState
from ..programs.linked_stage import Layout
from ..programs.stage_run import StageRun
from .operator_profile import Values, materialised

T = TypeVar("T")

LEAST_REPEATS, LONG_S = 1, 0.25
"""Smallest number of timed runs of a stage's programs, and seconds after which no more follow: the time of a long
program varies less, and rehearsed steps measure it again."""
OPTIMIZER_STEPS = 3
"""Number of timed steps of an optimizer, after one that creates its state."""


def profile_stages(
    programs: Mapping[int, StagePrograms],
    layout: Layout,
    operators: Operators,
    parameters: Values,
    buffers: Values,
    leaves: Sequence[Any],
    optimizer: OptimizerFactory | None,
    repeats: int = 3,
    device: torch.device | None = None,
    integers: Values | None = None,
) -> dict[int, StageCosts]:
    """Time the programs of stages, as the executor calls them.

    Args:
        programs: by stage index.
        layout: the tensors of every message.
        operators: the captured step's operators.
        parameters, buffers: by qualified name; may be on meta. They are not changed.
        leaves: one real microbatch.
        optimizer: creates an optimizer; None if the stages are not trained.
        repeats: largest number of timed runs of each, after a warm-up run; long ones have ``LEAST_REPEATS``.
        device: the device that runs them; by default the model's.
        integers: results of other than floating-point types, by node name, as `profile_operators` collects them.

    Returns:
        Costs by stage index.
    """
    device = device or compute_device([*parameters.values(), *buffers.values()])
    watch = Stopwatch(device)

    def measure(index: int, stage: StagePrograms, here: tuple[Any, ...]) -> StageCosts:
        own = {
            name: nn.Parameter(_own(parameters[name], device), requires_grad=parameters[name].requires_grad)
            for name in stage.inputs.parameters
        }
        state = StageState(
            own, {name: _own(buffers[name], device) for name in stage.inputs.buffers}, optimizer, device=device
        )
        run = StageRun(index, stage, layout, state, operators.step.constants, operators.step.outputs.main_result)
        seed = torch.ones((), dtype=operators.values[operators.step.outputs.main_result].dtype, device=device)
        return _stage_costs(run, _stand_ins(stage, device, integers or {}), here, seed, repeats, watch)

    with watch.active():
        here = tuple(leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        # A separate function, so that a stage's tensors are freed before the next stage allocates.
        return {index: measure(index, stage, here) for index, stage in programs.items()}


def _own(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor that an optimizer may change: a copy, or random values for one on meta."""
    return materialised(tensor, device) if tensor.is_meta else tensor.detach().to(device, copy=True)


def _stand_ins(stage: StagePrograms, device: torch.device, integers: Values) -> list[Tensor]:
    """Tensors in place of those that earlier stages send: random ones, and integers, which may be indices, as given."""

    def stand_in(each: Boundary) -> Tensor:
        if each.dtype.is_floating_point:
            return torch.randn(each.shape, dtype=each.dtype, device=device)
        if (known := integers.get(each.name)) is None:
            return torch.zeros(each.shape, dtype=each.dtype, device=device)
        return (known.permute(each.order) if each.order else known).to(device).contiguous()

    return [stand_in(each) for each in stage.inputs.boundary]


class _Series:
    """Times of F, B, I and W of one stage."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._series: dict[str, list[tuple[Any, Any]]] = {"F": [], "B": [], "I": [], "W": []}

    def time(self, kind: str, work: Callable[..., T], *arguments: Any) -> T:
        start = self._watch.now()
        result = work(*arguments)
        self._series[kind].append((start, self._watch.now()))
        return result

    def median(self, kind: str) -> float:
        """The median of all runs but the first, in seconds."""
        return statistics.median([self._watch.between(*span) for span in self._series[kind][1:]] or [0.0])


def _stage_costs(
    run: StageRun, boundary: list[Tensor], leaves: tuple[Any, ...], seed: Tensor, repeats: int, watch: Stopwatch
) -> StageCosts:
    key = random_key(0, 0, 0)
    programs = run.programs
    halves = programs.backward_input is not None and programs.backward_weight is not None
    series = _Series(watch)
    with torch.no_grad():
        for timed in range(repeats + 1):
            if timed == 1:
                begun = time.monotonic()
            if timed > LEAST_REPEATS and time.monotonic() - begun > LONG_S:
                break
            outputs, _results = series.time("F", run.forward, 0, list(boundary), leaves, key)
            tangents = {i: torch.ones_like(outputs[i]) for i in run.tangents}
            series.time("B", run.backward, 0, tangents, seed, leaves, key)
            if halves:
                run.forward(0, list(boundary), leaves, key)
                series.time("I", run.backward_input, 0, tangents, seed, leaves, key)
                series.time("W", run.backward_weight, 0, seed, leaves, key)
    median = {kind: series.median(kind) for kind in ("F", "B", "I", "W")}
    optimizer_s, optimizer_bytes = _optimizer_costs(run.state, watch)
    size = sum(p.nbytes for p in run.state.parameters.values())
    trained = [p.nbytes for p in run.state.parameters.values() if p.requires_grad]
    memory = programs.memory
    # A stage without separate I and W runs its whole backward in I or W, as the executor does.
    first, second = (median["I"], median["W"]) if halves else (median["B"], 0.0) if run.returned else (0.0, median["B"])
    return StageCosts(
        forward_s=median["F"], backward_input_s=first, backward_weight_s=second, backward_s=median["B"],
        optimizer_s=optimizer_s, parameter_bytes=size,
        gradient_bytes=sum(trained),
        optimizer_bytes=optimizer_bytes, saved_bytes=memory.saved, freed_by_input_bytes=memory.freed_by_input,
        created_by_input_bytes=memory.created_by_input, workspace_bytes=memory.workspace, input_bytes=memory.inputs,
        shared_bytes=memory.shared, largest_gradient_bytes=max(trained, default=0),
    )  # fmt: skip


def _optimizer_costs(state: StageState, watch: Stopwatch) -> tuple[float, int]:
    """Seconds of an optimizer step, and bytes of the optimizer's state. It changes copies of the parameters."""
    if state.optimizer is None:
        return 0.0, 0
    for parameter in state.parameters.values():
        # Not zeros: with them a step of AdamW takes twice as long as with other values (torch 2.13, CPU).
        parameter.grad = state.gradient_buffer(parameter).fill_(1e-3) if parameter.requires_grad else None
    times = []
    for _ in range(1 + OPTIMIZER_STEPS):
        start = watch.now()
        state.step()
        times.append((start, watch.now()))
    held = [value for per in state.optimizer.state.values() for value in per.values()]
    return statistics.median(watch.between(*span) for span in times[1:]), sum(storage_sizes(held).values())
