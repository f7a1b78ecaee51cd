"""``panpipe catalog``: devices, links and clusters, and where each number comes from."""

import re
import textwrap
from collections import Counter
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from ..answers.bundled_models import BUNDLED
from ..answers.options import argument, flag, json_flag, option
from ..answers.output import (
    UNITS,
    bytes_text,
    print_json,
    print_records,
    print_table,
    rate_text,
    seconds_text,
    write_noted,
)
from ..core.cluster.catalog import Catalogue, LinkType, catalogue, find_cluster
from ..core.cluster.catalog.find import cluster_in
from ..core.cluster.cluster import Cluster, cluster_json
from ..core.cluster.device_type import DeviceType
from ..core.cluster.sourced import joined
from ..core.cluster.topology import LinkClass, Topology, path_classes, topology_of
from ..core.documents import as_plain
from ..core.errors import RequestError, naming
from ..core.files.limits import CATALOGUE
from ..core.files.read import read_text
from ..core.report.chart.topology import topology_svg
from ..core.wording import counted, first_of

ASSUMED = "~"


def catalog(
    action: str | None = argument("Show one entry, or a file.", metavar="show"),
    name: str | None = argument(
        "A device, a link, a cluster such as 8xA100-40GB or 4x8xA100-80GB:nics=8, or a cluster file.", metavar="NAME"
    ),
    *,
    file: Path | None = option("Also read this catalogue file (TOML)."),
    svg: Path | None = option("show: write a drawing of the cluster here."),
    out: Path | None = option("show: write the cluster file (JSON) here."),
    models: bool = flag("List the bundled models instead.", "--models"),
    json: bool = json_flag(),
) -> None:
    """Devices, links and clusters, and where each number comes from.

    Peak rates are the vendors'; effective rates are those that programs reach. A small matrix product reaches a share
    of the rate of large ones, which depends on its shape. Assumed numbers are marked with ~.
    """
    if models:
        if action or file or svg or out:
            raise RequestError("--models lists the bundled models, and goes with --json alone: leave the rest out")
        _print_models(json)
        return
    known = catalogue() if file is None else catalogue().with_file(read_text(file, CATALOGUE), str(file))
    if action not in (None, "show") or (action is None) != (name is None):
        given = " ".join(("catalog", *(word for word in (action, name) if word)))
        raise RequestError(f"'{given}' is incomplete: write panpipe catalog, or panpipe catalog show NAME")
    if name is None:
        if svg or out:
            raise RequestError(f"--{'svg' if svg else 'out'} needs one cluster: write panpipe catalog show NAME")
        _print_all(known) if not json else print_json(_answer(known))
        return
    entry = _entry(known, name)
    if entry is not None:
        if svg or out:
            option = "svg" if svg else "out"
            raise RequestError(f"--{option} needs a cluster, and '{name}' is a device or link: write 1x{name}")
        _print_entry(entry) if not json else print_json(joined(entry))
        return
    try:
        with naming(*([] if file is None else [file])):
            cluster = find_cluster(name) if file is None else cluster_in(known, name)
    except RequestError as error:
        wrong_name = "there is no cluster" in str(error) and "did you mean" not in str(error)
        titled = _with_a_similar_word(known, name) if wrong_name else []
        if not titled:
            raise
        raise RequestError(
            f"there is no device, link or cluster '{name}': a similar word is in the title of {first_of(titled, 4)}; "
            "see panpipe catalog"
        ) from None
    write_noted(out, lambda: cluster_json(cluster))
    write_noted(svg, lambda: topology_svg(name, cluster))
    _print_cluster(name, known, cluster) if not json else print_json(as_plain(cluster))


def _print_models(json: bool) -> None:
    rows = [{"model": name, **as_plain(model)} for name, model in BUNDLED.items()]
    if json:
        print_json({"models": rows})
        return
    print_table(
        "Bundled models, for panpipe plan --model NAME: published architectures, without weights",
        ("model", "class", "tokens a sample", "dtype", "source"),
        [(r["model"], r["classes"][1], r["sequence"] or "images", r["dtype"], r["source"]) for r in rows],
        texts=("class", "dtype", "source"),
    )


def _entry(known: Catalogue, name: str) -> DeviceType | LinkType | None:
    """The device or link of that name or alias; None if it may be a cluster.

    Raises:
        RequestError: there is none, and only links have similar names.
    """
    with suppress(RequestError):
        return known.device(name)
    close = partial(get_close_matches, name.casefold(), n=1)
    if close(known.links) and not close([other.casefold() for other in (*known.devices, *known.clusters)]):
        return known.link(name)
    with suppress(RequestError):
        return known.link(name)
    return None


def _with_a_similar_word(known: Catalogue, name: str) -> list[str]:
    """The entries whose titles have a word that is similar to a name without digits in front."""
    entries: tuple[Any, ...] = (*known.devices.values(), *known.links.values(), *known.clusters.values())
    words = {each.name: re.findall(r"\w+", each.title.casefold()) for each in entries}
    plain = re.fullmatch(r"[A-Za-z][\w-]*", name)
    return [each for each in words if plain and get_close_matches(name.casefold(), words[each], cutoff=0.8)]


def _answer(known: Catalogue) -> dict[str, Any]:
    return {
        "devices": [joined(device) for device in known.devices.values()],
        "links": [joined(link) for link in known.links.values()],
        "nodes": [joined(node) for node in known.nodes.values()],
        "clusters": [
            {**as_plain(cluster), "devices": sum(group.nodes * group.gpus for group in cluster.groups)}
            for cluster in known.clusters.values()
        ],
    }


def _print_all(known: Catalogue) -> None:
    devices = list(known.devices.values())
    kinds = ("bf16", "tf32", "fp32")
    print_table(
        "Devices: peak TFLOP/s of dense matrix products, and what large ones reach",
        ("device", *(f"{kind}{which}" for kind in kinds for which in ("", " large"))),
        [(device.name, *(cell for kind in kinds for cell in _rates(device, kind))) for device in devices],
    )
    print_records(
        "Devices: memory, the part that plans may use, its bandwidth in GB/s, and their links", devices,
        {"device": "name", "memory": "memory_bytes B", "for plans": "usable_bytes B",
         "peak": lambda each: _number(each, "peak_memory_bytes_per_s", 1e9),
         "eff.": lambda each: _number(each, "effective_memory_bytes_per_s", 1e9),
         "to the host": "host_link", "between": "gpu_link"}, texts=("to the host", "between"),
    )  # fmt: skip
    print_records(
        "Links: GB/s in each direction; back to the device where that differs", known.links.values(),
        {"link": "name", "peak": lambda link: _number(link, "peak_bytes_per_s", 1e9),
         "eff.": lambda link: _number(link, "effective_bytes_per_s", 1e9),
         "back": lambda link: _number(link, "effective_back_bytes_per_s", 1e9),
         "latency": lambda link: _mark(link, "latency_s") + seconds_text(link.latency_s), "title": "title"},
        texts=("title",),
    )  # fmt: skip
    print_records(
        "Clusters; also any NODESxDEVICESxTYPE, such as 3x4xH100, with parameters after a colon, and cpu:N",
        known.clusters.values(),
        {"cluster": "name", "devices": lambda each: sum(group.nodes * group.gpus for group in each.groups),
         "title": "title"}, texts=("title",),
    )  # fmt: skip
    print(f"\n{ASSUMED} = assumed. Each number with its source: panpipe catalog show NAME")


def _rates(device: DeviceType, kind: str) -> tuple[str, str]:
    """The peak rate in TFLOP/s, and what large matrix products reach: the peak times their efficiency."""
    if kind not in device.peak_flops_per_s:
        return "–", "–"
    reached = device.large_product_flops_per_s(kind) / 1e12
    return _number(device, f"peak_flops_per_s.{kind}", 1e12), f"{_mark(device, 'efficiency.matmul')}{reached:.4g}"


def _mark(entry: Any, path: str) -> str:
    """``~`` if the number at ``path`` of an entry is assumed, otherwise nothing."""
    source = entry.sources.get(path)
    return ASSUMED if source is not None and source.assumed else ""


def _number(entry: Any, path: str, unit: float) -> str:
    """The number at ``path``, divided by ``unit``; empty if the entry has none."""
    value = _value(entry, path)
    return "" if value is None else f"{_mark(entry, path)}{value / unit:.4g}"


def _value(entry: Any, path: str) -> Any:
    """The number at ``path``: ``field`` or ``field.key``."""
    field, _, key = path.partition(".")
    return getattr(entry, field)[key] if key else getattr(entry, field)


def _print_entry(entry: Any) -> None:
    print(f"{entry.name}: {entry.title}")
    rows = [
        (path, _value_text(path.partition(".")[0], _value(entry, path)), str(source))
        for path, source in entry.sources.items()
    ]
    print_table("", ("number", "value", "source"), rows, texts=("source",))
    named = [(name, getattr(entry, name, None)) for name in ("host_link", "host_copy", "gpu_link")]
    for name, value in named:
        if value:
            print(f"{name} {value}")


def _value_text(field: str, value: float) -> str:
    """A number with the unit that ends its name."""
    for end, text in (("bytes_per_s", UNITS["B/s"]), ("_bytes", bytes_text), ("_s", seconds_text)):
        if field.endswith(end) and not field.endswith("flops_per_s"):
            return text(value)
    return f"{value / 1e12:.4g} TFLOP/s" if field.endswith("flops_per_s") else f"{value:.6g}"


def _print_cluster(name: str, known: Catalogue, cluster: Cluster) -> None:
    topology = topology_of(cluster)
    title = known.clusters[name].title if name in known.clusters else _summary(cluster, topology)
    print(textwrap.fill(f"{name}: {title}", Console().width))
    print_records(
        "Links: effective rate in each direction", topology.links,
        {"between": "ends", "links": "count", "rate": _rate_text, "latency": "latency_s s"},
    )  # fmt: skip
    print_records(
        f"Paths from {cluster.devices[0].name}, with no other traffic", path_classes(cluster),
        {"to": lambda path: "its host" if path.device is None else cluster.devices[path.device].name, "count": "count",
         "rate": "bytes_per_s GB/s", "latency": "latency_s s",
         "through": lambda path: " ".join(path.hubs) or "one link"}, texts=("through",),
    )  # fmt: skip
    for (memory_bytes, rate), count in _host_memory(cluster).items():
        parts = [] if memory_bytes is None else [f"memory of {bytes_text(memory_bytes)}"]
        parts += [] if rate is None else [f"{rate_text(rate)} for reads and writes of its memory together"]
        print(f"{counted(count, 'host')}, {'each ' if count > 1 else ''}with {' and '.join(parts)}")
    kinds = Counter((device.type or "device", device.memory_bytes) for device in cluster.devices)
    for (kind, memory_bytes), count in kinds.items():
        print(f"{count} × {kind}, {bytes_text(memory_bytes)} each for a plan")


def _host_memory(cluster: Cluster) -> Counter[tuple[int | None, float | None]]:
    """The number of hosts with each memory (bytes) and rate (bytes/s); hosts without either are not counted."""
    hosts = ((hub.memory_bytes, hub.memory_bytes_per_s) for hub in cluster.hubs if hub.kind == "host")
    return Counter(found for found in hosts if found != (None, None))


def _rate_text(kind: LinkClass) -> str:
    there = rate_text(kind.bytes_per_s)
    return there if kind.back_bytes_per_s is None else f"{there}, back {rate_text(kind.back_bytes_per_s)}"


def _summary(cluster: Cluster, topology: Topology) -> str:
    nodes = f" in {len(topology.nodes)} nodes" if len(topology.nodes) > 1 else ""
    return f"{counted(len(cluster.devices), 'device')}{nodes}"
