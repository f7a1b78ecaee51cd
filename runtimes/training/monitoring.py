"""Measures each step of a pipeline for the user's monitors, and calls them on the rank of the first device."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from attrs import evolve
from torch import Tensor

from ...core.trace.throughput import StepTotals, throughput
from ..engine.results import BatchResult
from ..engine.step_data import StepOptions
from ..microbatches import Microbatch
from ..monitor.measure import MemoryPeak, Numbers, gather_numbers, numbers_of
from ..monitor.monitors import Monitor, Monitors
from ..monitor.records import DeviceReport, StepReport
from ..update.stage_state import StageState
from .local_stages import LocalStages


class UpdateNumbers(NamedTuple):
    """The update of a step; see `records.StepReport`."""

    step: int
    due: bool
    skipped: bool
    norm: Tensor | None
    loss_scale: float | None


class Monitoring:
    """Measures steps for monitors. Every rank measures; the rank of the first device of the first replica calls them.

    Attributes:
        on: whether there are monitors.
    """

    def __init__(self, monitors: Sequence[Monitor], stages: LocalStages) -> None:
        self.on = bool(monitors)
        self._monitors, self._stages = Monitors(monitors), stages
        self._peaks: dict[int, MemoryPeak] = {}

    def follow(self, stages: LocalStages) -> None:
        """Continue with the stages of another plan."""
        self._stages, self._peaks = stages, {}

    def options(self, options: StepOptions) -> StepOptions:
        """The options of a step that is measured: its actions and its saved tensors are recorded."""
        return evolve(options, trace=True, watch=True) if self.on else options

    def report(self, done: BatchResult, pieces: Sequence[Microbatch], call_s: float, update: UpdateNumbers) -> None:
        """Measure a step that ran, and call the monitors. All ranks call this together.

        Args:
            call_s: its seconds in this process.
        """
        own = {}
        for device, record in done.records.items():
            peak = self._peaks.setdefault(device, MemoryPeak(self._states_on(device))).bytes(
                record.peak_saved + record.shared
            )
            own[device] = numbers_of(device, record, pieces, call_s, peak, done.trace)
        table = gather_numbers(self._stages.team, own)
        if self._stages.team.first:
            self._monitors.call(self._report(done, table, update))

    def close(self) -> None:
        """Close the monitors of the process that calls them."""
        if self._stages.team.first:
            self._monitors.close()

    def _states_on(self, device: int) -> list[StageState]:
        return [self._stages.states[stage.index] for stage in self._stages.plan.stages_on(device)]

    def _report(self, done: BatchResult, table: Sequence[Numbers], update: UpdateNumbers) -> StepReport:
        team, plan = self._stages.team, self._stages.plan
        time_s, step_s = max(each.call_s for each in table), max(each.step_s for each in table)
        first = table[:: len(table) // team.batches]  # the first device of each batch
        rows, tokens = sum(each.rows for each in first), sum(each.tokens for each in first)
        known = None if math.isnan(tokens) else round(tokens)
        rates = throughput(time_s, StepTotals(round(rows), known))
        devices = tuple(
            DeviceReport(
                rank=team.rank(number),
                replica=number // team.size,
                device=number % team.size,
                stages=tuple(stage.index for stage in plan.stages_on(number % team.size)),
                busy_s=each.busy_s,
                bubble=max(0.0, 1 - each.busy_s / step_s) if step_s else 0.0,
                memory_peak_bytes=round(each.memory_peak),
                saved_peak_bytes=round(each.saved_peak),
                messages=round(each.messages),
                message_bytes=round(each.message_bytes),
            )
            for number, each in enumerate(table)
        )
        assert done.loss is not None
        states = self._states_on(0)
        optimizer = next((state.optimizer for state in states if state.optimizer is not None), None)
        return StepReport(
            step=update.step,
            updated=update.due and not update.skipped,
            skipped=update.due and update.skipped,
            time_s=time_s,
            loss=done.loss.item(),
            metrics=dict(done.metrics()),
            rows=round(rows),
            rows_per_s=rates.samples_per_s or 0.0,
            tokens=known,
            tokens_per_s=rates.tokens_per_s,
            grad_norm=update.norm.item() if update.due and update.norm is not None else None,
            loss_scale=update.loss_scale,
            learning_rates=tuple(float(g["lr"]) for g in optimizer.param_groups if "lr" in g) if optimizer else (),
            devices=devices,
        )
