"""The numbers of one training step, which monitors are called with."""

from attrs import frozen

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
