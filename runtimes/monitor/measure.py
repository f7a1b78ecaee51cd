"""The numbers of a step, of each device; every rank gets those of all.

They come from the record of the step, whose actions are then marked as in a traced step.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.actions import SEND_KINDS, WORK_KINDS, Kind
from ...core.trace.trace import Trace
from ..engine.step_data import StepRecord
from ..launch.team import Team
from ..microbatches import Microbatch
from ..update.stage_state import StageState


class Numbers(NamedTuple):
    """The numbers of one device; see `records.DeviceReport`.

    Args:
        step_s: from its first action to its last.
        call_s: of the call of ``step`` in its process.
        rows, tokens: of its replica; NaN for unknown tokens.
    """

    busy_s: float
    step_s: float
    call_s: float
    memory_peak: float
    saved_peak: float
    messages: float
    message_bytes: float
    rows: float
    tokens: float


def numbers_of(
    device: int,
    record: StepRecord,
    pieces: Sequence[Microbatch],
    call_s: float,
    memory_peak: int,
    trace: Trace | None,
) -> Numbers:
    """The numbers of a device of this process.

    Args:
        pieces: the replica's microbatches.
        call_s: seconds of the call.
        memory_peak: of `MemoryPeak`.
        trace: of simulated devices; None for real ones.
    """
    spans: list[tuple[Kind, float, float]]
    if trace is None:
        spans = [(action.kind, end - start, size) for action, _, start, end, size in record.events]
        step_s, unit = (record.end_ns - record.start_ns) / 1e9, 1e-9
    else:
        own = (event for event in trace.events if event.device == device)
        spans = [(event.action.kind, event.end_s - event.start_s, event.bytes) for event in own]
        step_s, unit, call_s = trace.step_s, 1.0, trace.step_s
    sent = [size for kind, _, size in spans if kind in SEND_KINDS]
    busy_s = unit * sum(span for kind, span, _ in spans if kind in WORK_KINDS)
    rows, tokens = sum(piece.samples for piece in pieces), tokens_of(pieces)
    return Numbers(busy_s, step_s, call_s, memory_peak, record.peak_saved, len(sent), sum(sent), rows, tokens)


def gather_numbers(team: Team, own: Mapping[int, Numbers]) -> list[Numbers]:
    """The numbers of all devices of all replicas, on every rank; all ranks call this together.

    Args:
        own: device of this process → its numbers.
    """
    if len(team.local) == team.mesh.ranks:
        return [own[device] for device in team.local]
    return [Numbers(*row) for row in team.everywhere(lambda device: list(map(float, own[device])))]


def tokens_of(pieces: Sequence[Microbatch]) -> float:
    """Elements of ``input_ids``, the name that language models of transformers have for tokens; otherwise NaN."""
    found = [
        leaf.numel()
        for piece in pieces
        for name, leaf in zip(piece.names, piece.leaves, strict=True)
        if isinstance(leaf, Tensor) and name.endswith("['input_ids']")
    ]
    return float(sum(found)) if found else math.nan


class MemoryPeak:
    """The memory peak of one device; see `records.DeviceReport`.

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
            own = (t for s in self._states for t in (*s.parameters.values(), *s.buffers.values()))
            every = (*own, *gradients, *(value for of_one in kept for value in of_one if isinstance(value, Tensor)))
            self._held = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in every}.values())
            self._counted = counted
        return self._held + saved
