"""Options of the commands that build schedules without a model: uniform stages, and the search."""

from typing import Annotated

import typer

from ..core.errors import RequestError

Devices = Annotated[int, typer.Option(help="Devices along the pipeline.")]
Microbatches = Annotated[int, typer.Option(help="Microbatches in one step.")]
Forward = Annotated[float, typer.Option(help="One device's time of F for one microbatch, over all its chunks.")]
BackwardInput = Annotated[
    float | None,
    typer.Option(
        help="The same for I, the input-gradient half of a backward; as long as F if not given.", show_default=False
    ),
]
BackwardWeight = Annotated[
    float | None,
    typer.Option(help="The same for W, the weight-gradient half; as long as F if not given.", show_default=False),
]
MessageTime = Annotated[float, typer.Option(help="Delay of a message on every hop between two devices.")]
StageScale = Annotated[
    str | None, typer.Option(metavar="S0,S1,…", help="Factors on the times of each stage.", show_default=False)
]
FreedByInput = Annotated[float, typer.Option(help="Share of the saved tensors that I already frees.")]


def _microbatches_saved(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise RequestError(
            f"--memory-limit is '{text}': its unit is a device's saved tensors for one microbatch, so write a number, "
            "such as 4; for a limit in bytes, plan a model with panpipe plan"
        ) from None


MemoryLimit = Annotated[
    float | None,
    typer.Option(
        help="Most memory of a device, in its saved tensors for one microbatch.",
        show_default=False,
        metavar="NUMBER",
        parser=_microbatches_saved,
    ),
]
HOST_COPY = "Time to copy one device's saved tensors for one microbatch to the host and back, over all its chunks."
HostCopyTime = Annotated[float, typer.Option(help=HOST_COPY)]
Evaluations = Annotated[
    int | None,
    typer.Option(
        help="auto: number of orders to try; the default takes about ten seconds for 8 devices and 32 microbatches.",
        show_default=False,
    ),
]
Seconds = Annotated[
    float | None,
    typer.Option(
        help="auto: time of the search, in place of --evaluations; the schedule's name then has their number.",
        show_default=False,
    ),
]
Seed = Annotated[int | None, typer.Option(help="auto: seed of its random numbers.", show_default=False)]
