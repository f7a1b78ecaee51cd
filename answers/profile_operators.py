"""``panpipe profile``: measures operators and a link, and fits a device type to them."""

import datetime
import json
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from ..core.analytic.calibration import Calibration, Residual, Sample, calibrate
from ..core.cluster.catalog import catalogue, find_device
from ..core.cluster.catalog.catalogue import FORMAT
from ..core.cluster.device_type import DeviceType
from ..core.cluster.sourced import Source
from ..core.errors import RequestError
from ..core.files.write import write_text
from ..runtimes.devices.available_memory import machine
from .output import note, print_json, print_records, seconds_text

Numbers = Mapping[str, tuple[float, Source]]
"""Number and source by dotted name, the names as in ``DeviceType.sources``."""
GPU_SCALE = 64
"""How many times larger the measured operators are on a GPU than on a CPU core."""


def fit_device(
    model: str | None,
    where: torch.device,
    base: DeviceType,
    dtype: str,
    threads: int,
    repeats: int,
    title: str,
    out: Path | None,
    *,
    json: bool,
) -> None:
    """Measure operators and the link between two workers, and fit a device type to them.

    Args:
        model: the model whose operators are measured; panpipe's own operators of every kind if None.
        base: the catalogue's device with the peak rates.
    """
    if where.type == "cpu":
        torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = dtype == "tf32"
    note(f"measuring on {machine(where)}")
    samples = _samples(model, where, dtype, repeats)
    found = calibrate(samples, base, dtype)
    link = _link(where)
    host = f"{machine(where)}, {dtype}{f', {threads} threads' if where.type == 'cpu' else ''}"
    if out is not None:
        origin = f"measured by panpipe profile on {host}, {datetime.date.today().isoformat()}"
        write_text(out, device_file(title, base.name, host, _numbers(found, origin), _link_numbers(link, origin)))
    if json:
        print_json(_answer(found, base, host, link))
    else:
        _show(found, base, host, link)
        if out is not None:
            print(f"\nWritten to {out}: plan with --cluster {out}#2x{title}")


def chosen_device(name: str | None) -> torch.device:
    """The device to measure: the given one, by default cuda if there is a GPU.

    Raises:
        RequestError: the name is neither cpu nor cuda, or this machine has no CUDA device.
    """
    chosen = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if chosen not in ("cpu", "cuda"):
        raise RequestError(f"there is no device '{chosen}' to measure on: use cpu or cuda")
    if chosen == "cuda" and not torch.cuda.is_available():
        raise RequestError("no CUDA device is available here: use --device cpu")
    return torch.device(chosen)


def described_device(like: str | None, device: str | None) -> DeviceType:
    """The catalogue's device with the peak rates: the given one, by default that of this GPU's name, or a CPU core.

    Raises:
        RequestError: the catalogue has no such device.
    """
    if like is not None:
        return find_device(like)
    if chosen_device(device).type == "cpu":
        return find_device("cpu-core")
    own = torch.cuda.get_device_name()
    words = own.replace("-", " ").lower().split()
    words += [a + b for a, b in pairwise(words)]  # RTX 3090
    names = sorted(catalogue().devices, key=len, reverse=True)
    found = next((known for known in names if set(known.lower().split("-")).issubset(words)), None)
    if found is None:
        raise RequestError(f"the catalogue has no '{own}': give --like DEVICE for the peak rates, see panpipe catalog")
    return find_device(found)


def _samples(model: str | None, device: torch.device, dtype: str, repeats: int) -> Sequence[Sample]:
    from .models import DTYPES

    if model is None:
        from .kernel_profile import profile_kernels

        scale = GPU_SCALE if device.type == "cuda" else 1
        return profile_kernels(device, DTYPES[dtype], scale=scale, repeats=repeats)
    from ..core.analytic.model import model_work
    from .kernel_profile import model_samples
    from .models import planned_model

    planned = planned_model(model, 1, dtype=dtype, device=device)
    return model_samples(model_work(planned.operators), planned.measured())


def _link(device: torch.device) -> tuple[float, float] | None:
    """Bytes/s and latency between two workers; None on a GPU."""
    if device.type == "cuda":
        return None  # only one device is measured
    from ..runtimes.launch.team import ThreadTeam
    from ..runtimes.profile.measured_cluster import measured_cluster

    team = ThreadTeam(2)
    try:
        (link,) = measured_cluster(team, dict.fromkeys(team.local, device)).links
    finally:
        team.close()
    return link.bytes_per_s, link.latency_s


def _link_numbers(link: tuple[float, float] | None, origin: str) -> Numbers | None:
    if link is None:
        return None
    source = Source(f"{origin}: messages between two threads")
    rate, latency_s = link
    return {
        "peak_bytes_per_s": (rate, source),
        "effective_bytes_per_s": (rate, source),
        "latency_s": (latency_s, source),
    }


def _numbers(found: Calibration, origin: str) -> Numbers:
    numbers = dict(found.device.numbers())
    by_kind = {f"efficiency.{kind}": residuals for kind, residuals in found.by_kind.items()}
    sources = {name: Source(f"{origin}: {_errors_text(by_kind.get(name, found.residuals))}") for name in found.fitted}
    return {name: (numbers[name], source) for name, source in sources.items()}


def _errors_text(residuals: Sequence[Residual]) -> str:
    errors = [residual.error for residual in residuals]
    return (
        f"{len(errors)} operators, held-out error {statistics.median(errors):.0%} in the median, "
        f"{max(errors):.0%} at worst"
    )


def _answer(found: Calibration, base: DeviceType, what: str, link: tuple[float, float] | None) -> dict[str, Any]:
    numbers = dict(found.device.numbers())
    return {
        "machine": what,
        "like": base.name,
        "fitted": {name: numbers[name] for name in found.fitted},
        "kinds": {kind: _kind_answer(residuals) for kind, residuals in found.by_kind.items()},
        "median_error": found.median_error,
        "link": None if link is None else {"bytes_per_s": link[0], "latency_s": link[1]},
        "operators": [
            {
                "name": residual.sample.name,
                "kind": residual.sample.kind,
                "measured_s": residual.sample.seconds,
                "fitted_s": residual.fitted_s,
                "held_out_s": residual.held_out_s,
            }
            for residual in found.residuals
        ],
    }


def _kind_answer(residuals: Sequence[Residual]) -> dict[str, Any]:
    worst = max(residuals, key=lambda residual: residual.error)
    return {
        "operators": len(residuals),
        "fitted_median_error": statistics.median(residual.fitted_error for residual in residuals),
        "median_error": statistics.median(residual.error for residual in residuals),
        "worst_error": worst.error,
        "worst": worst.sample.name,
    }


def _show(found: Calibration, base: DeviceType, what: str, link: tuple[float, float] | None) -> None:
    device = found.device
    print(f"{what}; peak rates of {base.name}")
    print_records(
        "Efficiencies, and errors of predicted times: median of the fit, median and worst held out",
        [{"kind": kind, **_kind_answer(residuals)} for kind, residuals in found.by_kind.items()],
        {"kind": itemgetter("kind"), "operators": itemgetter("operators"),
         "of peak": lambda each: f"{device.efficiency[each['kind']]:.1%}",
         "fit": lambda each: f"{each['fitted_median_error']:.0%}",
         "held out": lambda each: f"{each['median_error']:.0%}", "worst": lambda each: f"{each['worst_error']:.0%}",
         "which": itemgetter("worst")},
    )  # fmt: skip
    print(f"\nLaunch {seconds_text(device.launch_overhead_s)}; memory for matrix products, attention and convolutions "
          f"{device.effective_memory_bytes_per_s / 1e9:.1f} GB/s")  # fmt: skip
    if link is not None:
        print(f"Between two threads {link[0] / 1e9:.1f} GB/s, {seconds_text(link[1])}")


def device_file(name: str, like: str, title: str, numbers: Numbers, link: Numbers | None = None) -> str:
    """The text of a catalogue file (TOML).

    Args:
        name: name of the device.
        like: the catalogue entry that all other numbers are inherited from.
        title: a name for display.
        numbers: those that differ from the entry's.
        link: numbers of a link type ``NAME-link`` between two such devices.
    """
    lines = [f'format = "{FORMAT}"', "", f"[devices.{_text(name)}]", f"like = {_text(like)}", f"title = {_text(title)}"]
    if link is not None:
        lines += [f"host_link = {_text(f'{name}-link')}", f"host_copy = {_text(f'{name}-link')}"]
    lines += [_line(key, *number) for key, number in numbers.items() if "." not in key]
    for table in dict.fromkeys(key.partition(".")[0] for key in numbers if "." in key):
        lines += ["", f"[devices.{_text(name)}.{table}]"]
        lines += [
            _line(key.partition(".")[2], *number) for key, number in numbers.items() if key.startswith(f"{table}.")
        ]
    if link is not None:
        lines += ["", f"[links.{_text(f'{name}-link')}]", f"title = {_text(f'Between two of {title}')}"]
        lines += [_line(key, *number) for key, number in link.items()]
    return "\n".join(lines) + "\n"


def _line(key: str, value: float, source: Source) -> str:
    return f"{key} = {{ value = {value:.4g}, {'assumed' if source.assumed else 'source'} = {_text(source.text)} }}"


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)  # a JSON string is a basic string of TOML
