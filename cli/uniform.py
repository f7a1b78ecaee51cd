"""Uniform stages: the options that describe them, shared by the commands for schedules on paper.

Times are in any one unit; memory is in one device's saved tensors for one microbatch, held until W or B ends.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ..core.costs import StageCosts
from ..core.errors import RequestError
from ..core.schedules.problem import ScheduleProblem

Devices = Annotated[int, typer.Option(help="Devices along the pipeline.")]
Microbatches = Annotated[int, typer.Option(help="Microbatches in one step.")]
Forward = Annotated[float, typer.Option(help="One device's time of F for one microbatch, over all its chunks.")]
BackwardInput = Annotated[float, typer.Option(help="The same of I, the input-gradient half of a backward.")]
BackwardWeight = Annotated[float, typer.Option(help="The same of W, the weight-gradient half.")]
Hop = Annotated[float, typer.Option(help="Delay of a message on every hop between two devices.")]
StageScale = Annotated[
    str | None, typer.Option(metavar="S0,S1,…", help="Factors on the times of each stage.", show_default=False)
]
FreedByInput = Annotated[float, typer.Option(help="Share of the saved tensors that I already frees.")]
MemoryLimit = Annotated[
    float | None,
    typer.Option(help="Most that a device may hold, in its saved tensors for one microbatch.", show_default=False),
]


def equal_stages(placement: Sequence[int], times: StageCosts) -> tuple[StageCosts, ...]:
    """One device's costs split evenly over the stages that it holds; one byte saved for a stage and microbatch."""
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


def uniform_times(forward: float, backward_input: float, backward_weight: float, freed: float) -> StageCosts:
    named = {"--forward": forward, "--backward-input": backward_input, "--backward-weight": backward_weight}
    for option, value in named.items():
        if not 0 <= value < float("inf"):
            raise RequestError(f"{option} is {value}: a time is finite and at least 0")
    if not 0 <= freed <= 1:
        raise RequestError(f"--freed-by-input is {freed}: a share is from 0 to 1")
    return StageCosts(forward, backward_input, backward_weight, saved_bytes=1, freed_by_input_bytes=freed)


def uniform_problem(
    chunks: int,
    *,
    devices: int,
    microbatches: int,
    device: StageCosts,
    scales: tuple[float, ...] | None,
    comm: float,
    limit: float | None,
) -> ScheduleProblem:
    """One device's costs split evenly over its chunks. Memory is in stages' worth: whole numbers add exactly."""
    if chunks < 1:
        raise RequestError(f"--chunks is {chunks}: a device holds at least 1 stage")
    stages = max(devices, 0) * chunks
    if scales is not None and len(scales) != stages:
        raise RequestError(
            f"--stage-scale has {len(scales)} factors: {devices} devices with {chunks} chunks have {stages} stages; "
            "give one factor for each"
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
    return ScheduleProblem(devices, microbatches, chunks, costs, comm, None if limit is None else limit * chunks)


def numbers(option: str, text: str, kind: type) -> tuple[Any, ...]:
    """The numbers of a comma-separated option; none is negative."""
    try:
        numbers = tuple(kind(word) for word in text.split(","))
    except ValueError:
        raise RequestError(f"{option} is '{text}': write numbers with commas between, such as 3,2,1") from None
    wrong = next((number for number in numbers if not 0 <= number < float("inf")), None)
    if wrong is not None:
        raise RequestError(f"{option} has {wrong}: each number is finite and at least 0")
    return numbers
