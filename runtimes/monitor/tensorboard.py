"""A monitor that writes the numbers of each step for TensorBoard."""

from pathlib import Path
from typing import Any

from ...core.errors import RequestError
from .records import StepReport


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
