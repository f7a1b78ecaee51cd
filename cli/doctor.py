"""``panpipe doctor``: whether a model trains as a pipeline, with the same results as one process."""

import functools
import warnings
from typing import Annotated

import typer

from ..answers.bundled_models import check_model_name
from ..answers.output import note, print_json


def doctor(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FACTORY",
            help="A function that returns (model, step, example_batch), optionally with a dict of options as fourth "
            "item: {'batch_dims': ...}, as in panpipe.pipeline.",
        ),
    ],
    devices: Annotated[
        list[int] | None, typer.Option(help="Devices to check on; may be repeated. 2 and 3 by default.", min=1)
    ] = None,
    microbatches: Annotated[int, typer.Option(help="Microbatches in one step.", min=1)] = 3,
    json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
) -> int:
    """Train three steps with several plans, and compare all results with the eager model in one process.

    Devices are threads. Random numbers are the same in both, so dropout stays on; BatchNorm stays in training mode.
    Exit status 1 means that a result differs.
    """
    check_model_name(model, bundled=False)

    import torch  # imported here, so that a mistyped name is refused at once

    from ..answers.doctor_answer import plain_findings, print_findings
    from ..answers.models import load_model
    from ..runtimes.diagnose.doctor import check_model
    from ..runtimes.launch.team import ThreadTeam

    torch.set_num_threads(1)
    made, step, batch, options = load_model(model)
    note(f"checking {type(made).__name__}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        teams = [functools.partial(ThreadTeam, count) for count in devices or (2, 3)]
        found = check_model(made, step, batch, teams, microbatches, **options)
    if json:
        print_json(plain_findings(found))
    else:
        print_findings(found)
    return 0 if found.healthy else 1
