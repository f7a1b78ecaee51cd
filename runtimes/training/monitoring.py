"""Measures each step of a pipeline for the user's monitors, and calls them on the rank of the first device.

The numbers come from the record of the step, whose actions are then marked as in a traced step. Every rank measures,
and gets the numbers of all devices.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from ...core.actions import SEND_KINDS, WORK_KINDS, Kind
from ...core.errors import in_a_line
from ...core.logs import LOGGER
from ..engine.results import Batch
from ..engine.step_data import StepOptions, StepRecord
from ..microbatches import Microbatch
from ..monitor.monitors import DeviceReport, Monitor, StepReport
from ..update.stage_state import StageState
from .local_stages import LocalStages
from .state import PipelineState

Measured = tuple[DeviceReport, float]
"""A device, without its bubble, and the seconds from its first action to its last."""


class Monitoring:
    """Measures steps for monitors, and calls them.

    A monitor that raises an exception does not change training. The exception is logged once, and again when it is
    another one; the monitor is called in later steps.

    Attributes:
        on: whether there are monitors.
    """

    def __init__(self, monitors: Sequence[Monitor], stages: LocalStages) -> None:
        self.on = bool(monitors)
        self._monitors, self._stages = monitors, stages
        self._logged: dict[int, str] = {}
        self._peaks: dict[int, MemoryPeak] = {}

    def follow(self, stages: LocalStages) -> None:
        """Continue with the stages of another plan."""
        self._stages, self._peaks = stages, {}

    def options(self, options: StepOptions) -> StepOptions:
        """The options of a step that is measured: its actions and its saved tensors are recorded."""
        return evolve(options, trace=True) if self.on else options

    def report(self, batch: Batch, call_s: float, state: PipelineState, due: bool, loss_scale: float | None) -> None:
        """Measure a step that ran, and call the monitors. All ranks call this together.

        Args:
            call_s: its seconds in this process.
            state: after the step.
            due: whether an update was due.
            loss_scale: the factor of its loss; None without a scaler.
        """
        team, pieces = self._stages.team, batch.pieces
        call_s = call_s if batch.trace is None else batch.trace.step_s
        own = [self._measured(device, record, batch) for device, record in batch.records.items()]
        mine = own, call_s, sum(piece.samples for piece in pieces), tokens_of(pieces)
        found = team.exchange().gather(mine)
        if not team.first:
            return
        table = [each for devices, *_ in found for each in devices]
        first = found[:: max(len(found) // team.batches, 1)]  # the first device of each batch
        rows, tokens = sum(rows for _, _, rows, _ in first), [own for _, _, _, own in first]
        time_s, step_s = max(seconds for _, seconds, *_ in found), max(seconds for _, seconds in table)
        known = None if None in tokens else sum(tokens)
        states = self._states_on(0)
        optimizer = next((state.optimizer for state in states if state.optimizer is not None), None)
        report = StepReport(
            step=state.steps,
            updated=due and not state.skipped,
            skipped=due and state.skipped,
            time_s=time_s,
            loss=batch.loss.item(),
            metrics=dict(state.metrics()),
            rows=rows,
            rows_per_s=rows / time_s if time_s > 0 else 0.0,
            tokens=known,
            tokens_per_s=known / time_s if known is not None and time_s > 0 else None,
            grad_norm=state.norm.item() if due and state.norm is not None else None,
            loss_scale=loss_scale,
            learning_rates=tuple(float(g["lr"]) for g in optimizer.param_groups if "lr" in g) if optimizer else (),
            devices=tuple(
                evolve(each, bubble=max(0.0, 1 - each.busy_s / step_s) if step_s else 0.0) for each, _ in table
            ),
        )
        for place, monitor in enumerate(self._monitors):
            self._guarded(place, f"in step {report.step}", partial(monitor, report))

    def close(self) -> None:
        """Close the monitors that have ``close()``, in the process that calls them."""
        for place, monitor in enumerate(self._monitors if self._stages.team.first else ()):
            close = getattr(monitor, "close", None)
            if callable(close):
                self._guarded(place, "when it was closed", close)

    def _guarded(self, place: int, when: str, work: Callable[[], Any]) -> None:
        try:
            work()
        except Exception as failure:
            monitor, reason = self._monitors[place], in_a_line(failure)
            if self._logged.get(place) != reason:
                self._logged[place] = reason
                name = getattr(monitor, "__qualname__", None) or type(monitor).__qualname__
                LOGGER.error("monitor %s failed %s: %s; training goes on, and it is called again", name, when, reason)

    def _states_on(self, device: int) -> list[StageState]:
        return [self._stages.states[stage.index] for stage in self._stages.plan.stages_on(device)]

    def _measured(self, device: int, record: StepRecord, batch: Batch) -> Measured:
        """A device of this process."""
        team, saved = self._stages.team, record.peak_saved
        if device not in self._peaks:
            self._peaks[device] = MemoryPeak(self._states_on(device))
        spans: list[tuple[Kind, float, float]]
        if batch.trace is None:
            spans = [(action.kind, end - start, size) for action, _, start, end, size in record.events]
            unit, step_s = 1e-9, (record.end_ns - record.start_ns) / 1e9
        else:
            events = (event for event in batch.trace.events if event.device == device)
            spans = [(event.action.kind, event.end_s - event.start_s, event.bytes) for event in events]
            unit, step_s = 1.0, batch.trace.step_s
        sent = [size for kind, _, size in spans if kind in SEND_KINDS]
        busy_s = unit * sum(span for kind, span, _ in spans if kind in WORK_KINDS)
        number, stages = team.replica * team.size + device, self._stages.plan.stages_on(device)
        peak = self._peaks[device].bytes(saved + record.shared)
        return DeviceReport(
            team.rank(number), team.replica, device, tuple(stage.index for stage in stages), busy_s, 0.0, peak, saved,
            len(sent), round(sum(sent)),
        ), step_s  # fmt: skip


def tokens_of(pieces: Sequence[Microbatch]) -> int | None:
    """Elements of ``input_ids``, the name that language models of transformers have for tokens; None without any."""
    found = [
        leaf.numel()
        for piece in pieces
        for name, leaf in zip(piece.names, piece.leaves, strict=True)
        if isinstance(leaf, Tensor) and name.endswith("['input_ids']")
    ]
    return sum(found) if found else None


class MemoryPeak:
    """The memory peak of one device; see `DeviceReport`.

    Args:
        states: of its stages.
    """

    def __init__(self, states: Sequence[StageState]) -> None:
        self._states = states
        self._device = next((state.device for state in states), torch.device("cpu"))
        self._counted, self._held = (-1, -1), 0

    def bytes(self, saved: int) -> int:
        """The peak in bytes.

        Args:
            saved: peak of the saved tensors in the last step, with what all microbatches share.
        """
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        optimizers = [state.optimizer for state in self._states if state.optimizer is not None]
        gradients = [tensor for state in self._states for tensor in state.gradient_buffers]
        counted = len(gradients), sum(len(optimizer.state) for optimizer in optimizers)
        if counted != self._counted:  # they are created in the first steps
            kept = (of_one.values() for optimizer in optimizers for of_one in optimizer.state.values())
            own = (t for s in self._states for t in (*s.parameters.values(), *s.updated.values(), *s.buffers.values()))
            every = (*own, *gradients, *(value for of_one in kept for value in of_one if isinstance(value, Tensor)))
            with torch._C.DisableTorchFunctionSubclass():  # parameters that replicas share refuse other uses now
                self._held = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in every}.values())
            self._counted = counted
        return self._held + saved
