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
from .options import declared

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

    Raises:
        RequestError: a time is negative or not finite, or the share ``freed`` is not from 0 to 1.
    """
    backward_input = forward if backward_input is None else backward_input
    backward_weight = forward if backward_weight is None else backward_weight
    named = {"--forward": forward, "--backward-input": backward_input, "--backward-weight": backward_weight}
    for option, value in named.items():
        _check_time(option, value)
    if not 0 <= freed <= 1:
        raise RequestError(f"--freed-by-input is {freed}: give a share from 0 to 1")
    return StageCosts(forward, backward_input, backward_weight, saved_bytes=1, freed_by_input_bytes=freed)


def _check_time(option: str, value: float) -> None:
    if not 0 <= value < float("inf"):
        raise RequestError(f"{option} is {value}: a time must be finite, at least 0")


def numbers(option: str, text: str, kind: type) -> tuple[Any, ...]:
    """The numbers of a comma-separated option.

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


def _microbatches_saved(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise RequestError(
            f"--memory-limit is '{text}': its unit is a device's saved tensors for one microbatch, so write a number, "
            "such as 4; for a limit in bytes, plan a model with panpipe plan"
        ) from None


@frozen(kw_only=True)
class UniformStages:
    """A pipeline of equal devices: the options of ``panpipe schedule`` and ``panpipe schedules``."""

    devices: int = declared("Devices along the pipeline.", ...)
    microbatches: int = declared("Microbatches in one step.", ...)
    chunks: int | None = declared("Number of stages of each device; the schedule's usual ones if not given.")
    forward: float = declared("One device's time of F for one microbatch, over all its chunks.", 1.0)
    backward_input: float | None = declared(
        "The same for I, the input-gradient half of a backward; as long as F if not given."
    )
    backward_weight: float | None = declared("The same for W, the weight-gradient half; as long as F if not given.")
    comm: float = declared("Delay of a message on every hop between two devices.", 0.0)
    stage_scale: tuple[float, ...] | None = declared(
        "Factors on the times of each stage.", metavar="S0,S1,…",
        parser=lambda text: numbers("--stage-scale", text, float),
    )  # fmt: skip
    freed_by_input: float = declared("Share of the saved tensors that I already frees.", 0.0)
    memory_limit: float | None = declared(
        "Most memory of a device, in its saved tensors for one microbatch.",
        metavar="NUMBER", parser=_microbatches_saved,
    )  # fmt: skip
    host_copy: float | None = declared(
        "Time to copy one device's saved tensors for one microbatch to the host and back, over all its chunks; if "
        "given, schedules that offload are compared, too."
    )

    @property
    def device(self) -> StageCosts:
        """Costs of one device for one microbatch, over all its chunks."""
        return uniform_times(self.forward, self.backward_input, self.backward_weight, self.freed_by_input)

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
        stages, device, scales = max(self.devices, 0) * chunks, self.device, self.stage_scale
        if scales is not None and len(scales) != stages:
            raise RequestError(
                f"--stage-scale has {len(scales)} factors: {self.devices} devices with {counted(chunks, 'chunk')} have "
                f"{stages} stages; give one factor for each"
            )
        costs = tuple(
            StageCosts(
                device.forward_s / chunks * scale,
                device.backward_input_s / chunks * scale,
                device.backward_weight_s / chunks * scale,
                saved_bytes=device.saved_bytes,
                freed_by_input_bytes=device.freed_by_input_bytes,
            )
            for scale in (scales or (1.0,) * stages)
        )
        copy_s = self.host_copy or 0.0
        _check_time("--host-copy", copy_s)
        memory, each = None if limit is None else limit * chunks, copy_s / 2 / (chunks * device.saved_bytes)
        return ScheduleProblem(self.devices, self.microbatches, chunks, costs, self.comm, memory, each)

    @property
    def chunks_to_try(self) -> tuple[int, ...]:
        """The given number of stages a device, or the one that follows from one factor for each stage; empty if neither
        is given. A number of factors that fits no number of chunks is 1, and `problem` raises the error."""
        if self.chunks is not None:
            return (self.chunks,)
        if self.stage_scale is None:
            return ()
        count, devices = len(self.stage_scale), self.devices
        return (count // devices if devices > 0 and count % devices == 0 else 1,)
