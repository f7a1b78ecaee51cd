"""``panpipe profile``: what operators take on the machine at hand, and the device type that this makes of it.

What measures is loaded when the request is known to be right: operators in `profile_operators`, links in
`profile_links`.
"""

from pathlib import Path
from typing import Annotated

import typer

from ..core.cluster.catalog import catalogue
from ..core.cluster.device_type import NUMBER_TYPES
from ..core.errors import RequestError
from .bundled import check_model_name
from .output import check_writable


def profile(
    what: Annotated[
        str | None,
        typer.Argument(metavar="[links]", help="Measure the links between ranks instead.", show_default=False),
    ] = None,
    *,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FACTORY|NAME",
            help="Measure this model's operators; those of every kind that come with panpipe if not given.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; the GPU where there is one.", show_default=False)
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(
            help="The catalogue's device whose peak rates hold; that of this GPU's name, or cpu-core.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="fp32, tf32, bf16 or fp16.")] = "fp32",
    threads: Annotated[int, typer.Option(help="Threads of an operator on a CPU.", min=1)] = 1,
    repeats: Annotated[int, typer.Option(help="Runs of each operator; the least time counts.", min=1)] = 7,
    name: Annotated[str | None, typer.Option(help="Of the device in the file.", show_default=False)] = None,
    ranks: Annotated[
        int | None, typer.Option(help="links: processes to start, where torchrun started none.", show_default=False)
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="links: the transport; see panpipe backends.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write a catalogue file (TOML) with the device here; of links, a cluster file (JSON).",
            show_default=False,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON alone.")] = False,
) -> int:
    """Measure operators and the link between two workers, and fit a device type to them.

    The residuals tell how far predictions are off: of operators that the fit has seen, and, held out, of those that it
    has not.

    With links: latency and rate of every pair of ranks in both directions, alone, and of groups that send to all others
    at once, so that shared links show; as a cluster file.
    """
    check_writable(out)
    if what is not None:
        if what != "links" or model is not None or name is not None:
            given = what if what != "links" else "links --model" if model is not None else "links --name"
            raise RequestError(f"'profile {given}' is nothing to measure: write panpipe profile, or profile links")
        from .profile_links import profile_links
        from .profile_operators import chosen_device, described_device

        where = chosen_device(device)
        return profile_links(where, described_device(like, device).name, ranks, backend, max(repeats, 2), out, json)
    if ranks is not None or backend is not None:
        option = "--ranks" if ranks is not None else "--backend"
        raise RequestError(f"{option} is for links: write panpipe profile links {option} …")
    if dtype not in NUMBER_TYPES:
        raise RequestError(f"there is no number type '{dtype}': use one of {', '.join(NUMBER_TYPES)}")
    if model is not None:
        check_model_name(model)
    from .profile_operators import chosen_device, described_device, profile_operators

    where, base = chosen_device(device), described_device(like, device)
    title = name or f"measured-{base.name}"
    if out is not None and title in catalogue().devices:
        raise RequestError(f"device '{title}' is in the catalogue already: give the measured one another --name")
    profile_operators(model, where, base, dtype, threads, repeats, title, out, json=json)
    return 0
