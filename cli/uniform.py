"""Uniform stages: the options that describe them, shared by the commands for schedules on paper.

Times are in any one unit; memory is in one device's saved tensors for one microbatch, held until W or B ends.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from ..core.costs import StageCosts
from ..core.errors import InfeasibleError, RequestError
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

Evaluations = Annotated[
    int | None,
    typer.Option(
        help="auto: orders to try; the default takes about ten seconds for 8 devices and 32 microbatches.",
        show_default=False,
    ),
]
Seed = Annotated[int | None, typer.Option(help="auto: of its random numbers.", show_default=False)]

CHUNKS_TO_TRY = (1, 2, 3, 4)
"""Stages a device that are looked at where none are given."""


def chunks_by_scales(scales: tuple[float, ...] | None, devices: int) -> tuple[int, ...]:
    """The number of chunks that a factor for each stage says; none where there are no factors.

    A number of factors that fits no number of chunks gives 1; whoever makes the problem tells what is wrong.
    """
    if scales is None:
        return ()
    return (len(scales) // devices if devices > 0 and len(scales) % devices == 0 else 1,)


def check_search(given: Mapping[str, Any], limit: float | None) -> None:
    """Check the parameters of a search, and that its limit allows one microbatch."""
    if given.get("evaluations", 1) < 1:
        raise RequestError(f"--evaluations is {given['evaluations']}: a search tries at least 1 order")
    if not 0 <= given.get("seed", 0) < 2**31:
        raise RequestError(f"--seed is {given['seed']}: it is from 0 to 2147483647")
    if limit is not None and limit < 1:
        raise InfeasibleError(
            f"the memory limit is {limit:g}: one microbatch on every stage of a device takes 1; "
            "raise --memory-limit to at least 1"
        )


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
