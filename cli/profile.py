"""``panpipe profile``: measure operators on this machine, or links between ranks.

`answers/profile_operators` and `answers/profile_links`, which import torch, are imported after the request was checked.
"""

from pathlib import Path

from ..answers.bundled_models import check_model_name
from ..answers.options import argument, json_flag, option
from ..answers.output import check_writable
from ..core.cluster.catalog import catalogue
from ..core.cluster.device_type import NUMBER_TYPES
from ..core.errors import RequestError


def profile(
    what: str | None = argument("Measure links between ranks instead of operators.", metavar="links"),
    *,
    model: str | None = option(
        "Measure this model's operators; panpipe's own operators of every kind if not given.",
        metavar="MODULE:FACTORY|NAME",
    ),
    device: str | None = option("cpu or cuda; cuda if there is a GPU."),
    like: str | None = option(
        "The catalogue's device with the same peak rates; by default that of this GPU's name, or cpu-core."
    ),
    dtype: str = option("fp32, tf32, bf16 or fp16.", "fp32"),
    threads: int = option("Threads of an operator on a CPU.", 1, min=1),
    repeats: int = option("Runs of each operator; the minimum is used.", 7, min=1),
    name: str | None = option("Name of the device in the file."),
    ranks: int | None = option("links: processes to start, if not under torchrun."),
    backend: str | None = option("links: the transport; see panpipe backends."),
    out: Path | None = option("Write a catalogue file (TOML) with the device here; with links, a cluster file (JSON)."),
    json: bool = json_flag(),
) -> int:
    """Measure operators and the link between two workers, and fit a device type to them.

    It prints the errors of predicted times, for operators in the fit, and for operators held out of it.

    With links, it measures latency and rate of every pair of ranks in both directions, alone, and the throughput of
    groups that send to all others at the same time, to find shared links, and writes a cluster file.
    """
    check_writable(out)
    if what is not None:
        if what != "links" or model is not None or name is not None:
            given = what if what != "links" else "links --model" if model is not None else "links --name"
            raise RequestError(f"'profile {given}' is not a measurement: write panpipe profile, or profile links")
        from ..answers.profile_links import profile_links
        from ..answers.profile_operators import chosen_device, described_device

        where = chosen_device(device)
        return profile_links(where, described_device(like, device).name, ranks, backend, max(repeats, 2), out, json)
    if ranks is not None or backend is not None:
        option = "--ranks" if ranks is not None else "--backend"
        raise RequestError(f"{option} is for links: write panpipe profile links {option} …")
    measured = [name for name in NUMBER_TYPES if name != "fp8"]
    if dtype not in measured:
        raise RequestError(f"operators are not measured in '{dtype}': use one of {', '.join(measured)}")
    if model is not None:
        check_model_name(model)
    from ..answers.profile_operators import chosen_device, described_device, fit_device

    where, base = chosen_device(device), described_device(like, device)
    title = name or f"measured-{base.name}"
    if out is not None and title in catalogue().devices:
        raise RequestError(f"device '{title}' is in the catalogue already: give the measured one another --name")
    fit_device(model, where, base, dtype, threads, repeats, title, out, json=json)
    return 0
