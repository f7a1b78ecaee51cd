"""Calls the user's monitors, which are functions of the numbers of a step, on one rank; two write files: a line of JSON
for each step, or what TensorBoard reads.
"""

import json
import math
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from ...core.errors import RequestError
from ...core.plain_data import exchanged


@exchanged
@frozen
class DeviceReport:
    """One device in a step.

    Args:
        rank: its rank; for a thread the number of its device.
        replica: number of its pipeline; tensor ranks have one each.
        device: its number along the pipeline.
        stages: its stages.
        busy_s: seconds in which it ran stage programs: F, B, I, W and RECOMPUTE.
        bubble: share of the step in which it did not, from 0 to 1.
        memory_peak_bytes: on a GPU the largest number of bytes that torch has allocated since the process started or
            ``torch.cuda.reset_peak_memory_stats``; on a CPU parameters, gradients, buffers and optimizer state, and the
            largest number of bytes of saved tensors in this step.
        saved_peak_bytes: these saved tensors alone.
        messages: number of messages between stages that it sent.
        message_bytes: their size.
    """

    rank: int
    replica: int
    device: int
    stages: tuple[int, ...]
    busy_s: float
    bubble: float
    memory_peak_bytes: int
    saved_peak_bytes: int
    messages: int
    message_bytes: int


@frozen(kw_only=True)
class StepReport:
    """One call of ``step`` of a pipeline, over all devices of all replicas.

    Args:
        step: its number, from 1: ``steps`` of the pipeline after it.
        updated: whether parameters were updated; False for a skipped update, and with ``update=False``.
        skipped: whether an update was due and was skipped.
        time_s: seconds of the call, of the slowest rank; for simulated devices those of the simulator.
        loss: over all replicas; possibly NaN or infinite.
        metrics: the other parts of the step's result.
        rows: samples of all replicas; those of a batch that tensor ranks share count once.
        rows_per_s: per second of ``time_s``.
        tokens: number of elements of the batch's ``input_ids``, over all replicas; None for a batch without.
        tokens_per_s: per second of ``time_s``; None without ``tokens``.
        grad_norm: global norm of the gradients before clipping; None without ``clip_norm``, and without an update.
        loss_scale: the factor of this step's loss; None without a scaler.
        learning_rates: of each parameter group of the first device, after this step.
        devices: of all replicas, replica by replica.
    """

    step: int
    updated: bool
    skipped: bool
    time_s: float
    loss: float
    metrics: dict[str, float]
    rows: int
    rows_per_s: float
    tokens: int | None
    tokens_per_s: float | None
    grad_norm: float | None
    loss_scale: float | None
    learning_rates: tuple[float, ...]
    devices: tuple[DeviceReport, ...]

    @property
    def bubble(self) -> float:
        """Mean share of the step in which devices ran no program."""
        return sum(each.bubble for each in self.devices) / len(self.devices)

    @property
    def messages(self) -> int:
        """Number of messages between stages."""
        return sum(each.messages for each in self.devices)

    @property
    def message_bytes(self) -> int:
        """Bytes of all messages between stages."""
        return sum(each.message_bytes for each in self.devices)

    @property
    def memory_peak_bytes(self) -> int:
        """The largest peak of a device."""
        return max(each.memory_peak_bytes for each in self.devices)


Monitor = Callable[[StepReport], Any]
"""Called after each step; its ``close()``, if it has one, is called when the pipeline is closed."""


def monitors_of(given: Monitor | Sequence[Monitor] | None) -> tuple[Monitor, ...]:
    """The monitors of ``monitor=``: one function, or several.

    Raises:
        RequestError: it is neither.
    """
    found = () if given is None else tuple(given) if isinstance(given, list | tuple) else (given,)
    for each in found:
        if not callable(each):
            raise RequestError(
                f"monitor is {each!r}: give a function of a panpipe.monitors.StepReport, such as "
                "panpipe.monitors.JsonLines('a.json'), or a list of them"
            )
    return found


class JsonLines:
    """Appends a line to a file for each step: the fields of `StepReport`, and its sums over devices.

    A number that JSON does not have is the string ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``, which Python's
    ``float`` reads. Lines are written to the file at once. The file is opened at the first step, so that every rank may
    create the monitor and only the rank that is called writes.

    Args:
        path: of the file; its folder is created.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file: FileIO | None = None

    def __call__(self, report: StepReport) -> None:
        """Write a line."""
        sums = {name: getattr(report, name) for name in ("bubble", "messages", "message_bytes", "memory_peak_bytes")}
        line = json.dumps(_plain(asdict(report) | sums), allow_nan=False) + "\n"
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            line = _end_of_part(self._path) + line
            self._file = self._path.open("ab", buffering=0)
        try:
            left = memoryview(line.encode())
            while left:
                left = left[self._file.write(left) :]
        except OSError:  # the file may end with a part of the line
            self.close()
            raise

    def close(self) -> None:
        """Close the file; a later step opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _end_of_part(path: Path) -> str:
    """A line break if a file ends with a part of a line: the disk was full, or a process was killed."""
    if not path.is_file() or not path.stat().st_size:
        return ""
    with path.open("rb") as file:
        file.seek(-1, 2)
        return "" if file.read() == b"\n" else "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


class TensorBoard:
    """Writes scalars for TensorBoard, by ``torch.utils.tensorboard``; needs the extra ``panpipe[tensorboard]``.

    The writer is created at the first step, so that every rank may create the monitor and only the rank that is called
    writes.

    Args:
        folder: of the event files; None for torch's default, ``runs/``.

    Raises:
        RequestError: the package ``tensorboard`` is not installed.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as missing:
            raise RequestError(
                f"TensorBoard files need the package tensorboard ({missing}): pip install 'panpipe[tensorboard]'"
            ) from missing
        self._make, self._folder = SummaryWriter, folder
        self._writer: Any = None

    def __call__(self, report: StepReport) -> None:
        """Write the numbers of a step."""
        if self._writer is None:
            self._writer = self._make(None if self._folder is None else str(self._folder))
        for tag, value in scalars(report).items():
            self._writer.add_scalar(tag, value, report.step)

    def close(self) -> None:
        """Write what is buffered, and close the file; a later step opens another one."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def scalars(report: StepReport) -> dict[str, float]:
    """The numbers of a step by their tags; those that are not known are left out."""
    found: dict[str, float | None] = {
        "loss": report.loss,
        **{f"metrics/{name}": value for name, value in report.metrics.items()},
        **{f"learning_rate/group {number}": rate for number, rate in enumerate(report.learning_rates)},
        "update/grad_norm": report.grad_norm,
        "update/loss_scale": report.loss_scale,
        "update/skipped": float(report.skipped),
        "step/time_s": report.time_s,
        "step/bubble": report.bubble,
        "step/rows_per_s": report.rows_per_s,
        "step/tokens_per_s": report.tokens_per_s,
        "step/messages": report.messages,
        "step/message_bytes": report.message_bytes,
    }
    for each in report.devices:
        found[f"memory_peak_bytes/rank {each.rank}"] = each.memory_peak_bytes
        found[f"bubble/rank {each.rank}"] = each.bubble
    return {tag: value for tag, value in found.items() if value is not None}
