"""Options of the search for schedules."""

from typing import Annotated

import typer

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
