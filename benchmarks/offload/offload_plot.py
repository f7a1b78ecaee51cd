"""The picture of weak scaling: saved tensors of a device over the number of devices, both in powers of two."""

from collections.abc import Mapping, Sequence
from math import log2

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
