"""Uniform stages, for schedules without a model.

Times may be in any unit. The unit of memory is one device's saved tensors for one microbatch, held until W or B ends.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from attrs import frozen

from ..core.costs.costs import StageCosts
from ..core.errors import RequestError
from ..core.schedules.problem import ScheduleProblem
from ..core.wording import counted

CHUNKS_TO_TRY = (1, 2, 3, 4)
"""Numbers of stages per device to try if none is given."""


def equal_stages(placement: Sequence[int], times: StageCosts) -> tuple[StageCosts, ...]:
    """One device's costs split evenly over its stages; one byte is saved per stage and microbatch."""
    held = Counter(placement)
    return tuple(
        StageCosts(
            times.forward_s / held[device],
            times.backward_input_s / held[device],
            times.backward_weight_s / held[device],
            saved_bytes=1,
        )
        for device in placement
    )


def uniform_times(
    forward: float, backward_input: float | None, backward_weight: float | None, freed: float
) -> StageCosts:
    """The costs of one device for one microbatch; I and W take as long as F where they are not given.

    Args:
        forward, backward_input, backward_weight: times of F, I and W, in any unit.
        freed: share of the saved tensors that I frees.

    Raises:
        RequestError: a time is negative or not finite, or the share is not from 0 to 1.
    """
    backward_input = forward if backward_input is None else backward_input
    backward_weight = forward if backward_weight is None else backward_weight
    named = {"--forward": forward, "--backward-input": backward_input, "--backward-weight": backward_weight}
    for option, value in named.items():
        if not 0 <= value < float("inf"):
            raise RequestError(f"{option} is {value}: a time must be finite, at least 0")
    if not 0 <= freed <= 1:
        raise RequestError(f"--freed-by-input is {freed}: give a share from 0 to 1")
    return StageCosts(forward, backward_input, backward_weight, saved_bytes=1, freed_by_input_bytes=freed)


@frozen
class UniformStages:
    """A pipeline of equal devices, for any number of stages per device.

    Args:
        devices: along the pipeline.
        microbatches: in one step.
        device: costs of one device for one microbatch, over all its chunks.
        scales: factors on the times of each stage, or None.
        comm: delay of a message between two devices.
        host_copy: time to copy one device's saved tensors for one microbatch to the host and back.
    """

    devices: int
    microbatches: int
    device: StageCosts
    scales: tuple[float, ...] | None
    comm: float
    host_copy: float = 0.0

    def problem(self, chunks: int, limit: float | None) -> ScheduleProblem:
        """The pipeline with ``chunks`` stages on each device, each with an equal part of the device's costs.

        The unit of memory is the saved tensors of one stage: each F adds 1, and sums of integers are exact.

        Args:
            chunks: number of stages of each device.
            limit: memory limit of a device in its saved tensors for one microbatch, or None.

        Raises:
            RequestError: there are no chunks, or the number of stage factors is not the number of stages.
        """
        if chunks < 1:
            raise RequestError(f"--chunks is {chunks}: a device has at least 1 stage")
        stages = max(self.devices, 0) * chunks
        if self.scales is not None and len(self.scales) != stages:
            raise RequestError(
                f"--stage-scale has {len(self.scales)} factors: {self.devices} devices with "
                f"{counted(chunks, 'chunk')} have {stages} stages; give one factor for each"
            )
        costs = tuple(
            StageCosts(
                self.device.forward_s / chunks * scale,
                self.device.backward_input_s / chunks * scale,
                self.device.backward_weight_s / chunks * scale,
                saved_bytes=self.device.saved_bytes,
                freed_by_input_bytes=self.device.freed_by_input_bytes,
            )
            for scale in (self.scales or (1.0,) * stages)
        )
        memory = None if limit is None else limit * chunks
        if not 0 <= self.host_copy < float("inf"):
            raise RequestError(f"--host-copy is {self.host_copy}: a time must be finite, at least 0")
        each = self.host_copy / 2 / (chunks * self.device.saved_bytes)
        return ScheduleProblem(self.devices, self.microbatches, chunks, costs, self.comm, memory, each)

    @property
    def chunks_by_scales(self) -> tuple[int, ...]:
        """The number of chunks that follows from one factor for each stage; empty without factors.

        If the number of factors fits no number of chunks, it is 1, and `problem` raises the error.
        """
        if self.scales is None:
            return ()
        count, devices = len(self.scales), self.devices
        return (count // devices if devices > 0 and count % devices == 0 else 1,)


def numbers(option: str, text: str, kind: type) -> tuple[Any, ...]:
    """The numbers of a comma-separated option.

    Args:
        option: its name, for errors.
        text: its value.
        kind: ``int`` or ``float``.

    Raises:
        RequestError: a part is not a number, is negative, or is not finite.
    """
    try:
        numbers = tuple(kind(word) for word in text.split(","))
    except ValueError:
        raise RequestError(f"{option} is '{text}': write numbers with commas between, such as 3,2,1") from None
    wrong = next((number for number in numbers if not 0 <= number < float("inf")), None)
    if wrong is not None:
        raise RequestError(f"{option} has {wrong}: each number must be finite, at least 0")
    return numbers
