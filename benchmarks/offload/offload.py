"""The picture of docs/offload.md: saved tensors of a device under 1F1B and with offload, as the model grows.

    python benchmarks/offload/offload.py [--svg docs/offload_scaling.svg] [--record FILE]

Two layers of four operators for each device, and twice as many microbatches as devices. The round trip of a layer's
saved tensors to the host takes 0.8 of the forward and backward that they are saved for; each device has its own link to
its host. Steps and peaks are simulated. The saved tensors of a device are a share of those of the model for one
microbatch. Status 1 unless that share falls to less than a quarter with PO-F, and does not with 1F1B.
"""

import sys
from collections.abc import Mapping, Sequence
from math import log2
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from panpipe.core.costs.costs import stage_costs, stage_edges
from panpipe.core.offload.choice import of_stages
from panpipe.core.offload.plan_offload import offloadable, with_offload
from panpipe.core.offload.storages import graph_storages
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import find_family
from panpipe.core.search.problem.assemble import assemble
from panpipe.simulators.oracle import simulated

from benchmarks.driver import argument_parser, report
from tests.support.offload_clusters import SAVED, cluster_with_hosts, uniform_graph

TITLES = {"1f1b": "1F1B", "gis-h": "GIS-H", "po-h": "PO-H", "po-f": "PO-F"}
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 640, 360, 64, 56, 110, 48
COLOURS = ("#2a6fb0", "#b8432f", "#b07d2a", "#3c8a5a", "#7a5aa8")
STYLE = (
    'text{font:12px ui-sans-serif,system-ui,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;fill:#1c2127}'
    ".t{font-size:16px;font-weight:650}.s{fill:#5d6670}.e{text-anchor:end}.m{text-anchor:middle}.grid{stroke:#e5e2db}"
    "polyline{fill:none;stroke-width:2}"
)


def weak_scaling_svg(series: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """An SVG of lines, one for each schedule.

    Args:
        series: per schedule (devices, saved tensors of a device as a share of the model's).
    """
    points = [point for line in series.values() for point in line]
    counts = sorted({devices for devices, _ in points})
    low, high = (round_power(edge(value for _, value in points), up) for edge, up in ((min, False), (max, True)))

    def x(devices: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * log2(devices / counts[0]) / log2(counts[-1] / counts[0])

    def y(size: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * log2(size / low) / log2(high / low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img"><title>Weak scaling: saved tensors of a device</title><style>{STYLE}</style>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text class="t" x="{LEFT}" y="22">Saved tensors of a device ÷ those of the model</text>',
        f'<text class="s" x="{LEFT}" y="40">the model: for one microbatch, two layers for each device; '
        "both axes in powers of two</text>",
    ]
    size = low
    while size <= high:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(size):.1f}" y2="{y(size):.1f}"/>')
        parts.append(f'<text class="s e" x="{LEFT - 8}" y="{y(size) + 4:.1f}">{size:.3g}</text>')
        size *= 2
    parts += [f'<text class="s m" x="{x(n):.1f}" y="{HEIGHT - BOTTOM + 20}">{n}</text>' for n in counts]
    parts.append(f'<text class="s m" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}">devices</text>')
    for (name, line), colour in zip(series.items(), COLOURS, strict=False):
        path = " ".join(f"{x(n):.1f},{y(value):.1f}" for n, value in line)
        parts.append(f'<polyline points="{path}" stroke="{colour}"/>')
        parts += [f'<circle cx="{x(n):.1f}" cy="{y(value):.1f}" r="3" fill="{colour}"/>' for n, value in line]
        last = line[-1]
        parts.append(f'<text x="{x(last[0]) + 10:.1f}" y="{y(last[1]) + 4:.1f}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def round_power(value: float, up: bool) -> float:
    """The next power of two, above or below."""
    power = log2(value)
    return float(2.0 ** (int(power // 1) + (1 if up and power % 1 else 0)))


def held(name: str, devices: int) -> tuple[int, float, float]:
    """Bytes of saved tensors of the fullest device, their share of the model's, and the step of a schedule."""
    chunks, microbatches, cluster = 1 if name == "1f1b" else 2, 2 * devices, cluster_with_hosts(devices)
    graph, stages = uniform_graph(2 * devices, 0.8, parts=4), devices * chunks
    size = len(graph.nodes) // stages
    names = [[node.name for node in graph.nodes[s * size : (s + 1) * size]] for s in range(stages)]
    costs = stage_costs(graph, names)
    schedule = find_family(name).build(ScheduleProblem(devices, microbatches, chunks, costs))
    plan = assemble(graph, names, schedule, edges=stage_edges(graph, names))
    offload = dict(find_family(name).build(ScheduleProblem(devices, microbatches, chunks)).offload)
    if offload:
        storages = graph_storages(graph, [stage.nodes for stage in plan.stages], costs)
        plan = with_offload(plan, offloadable(plan, costs, cluster, storages), of_stages(offload))
    result = simulated(plan, costs, cluster)
    most = max(result.peak_saved_bytes)
    return most, most / (SAVED * 2 * devices), result.step_s


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--svg", type=Path, help="write the picture here")
    given = parser.parse_args()
    series: dict[str, list[tuple[int, float]]] = {title: [] for title in TITLES.values()}
    rows = []
    for devices in (4, 8, 16, 32):
        rows.append([str(devices)])
        for name, title in TITLES.items():
            most, share, step_s = held(name, devices)
            series[title].append((devices, share))
            rows[-1].append(f"{most / 1e9:.2f} GB ({share:.1%}), {step_s:.3g} s")
    if given.svg is not None:
        given.svg.write_text(weak_scaling_svg(series), encoding="utf-8")
    header = ("devices", *(f"{title}: saved tensors of a device (of the model), step" for title in TITLES.values()))
    report(given.record, "Weak scaling: two layers for each device, k 0.8", header, rows)
    first, last = ({title: points[at][1] for title, points in series.items()} for at in (0, -1))
    sys.exit(not (last["PO-F"] < first["PO-F"] / 4 and last["1F1B"] > 0.99 * first["1F1B"]))


if __name__ == "__main__":
    main()
