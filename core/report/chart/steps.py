"""A step as an SVG, or a predicted and a measured one: a lane per device and step, and below the saved tensors.

The SVG is self-contained, and the same input gives the same bytes. Hovering over an action shows its times. Kinds have
the hues of Okabe and Ito (`Color Universal Design <https://jfly.uni-koeln.de/color/>`_); a device's later chunks are
paler.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from attrs import frozen

from ...actions import Kind
from ...ratios import bubble_ratio
from ...trace.compare import compare
from ...trace.trace import COMPUTE_QUEUE, Trace, TraceEvent
from ...wording import signed_percent

LEFT, RIGHT, TOP, MARGIN = 132.0, 150.0, 104.0, 16.0
"""Pixels around the charts."""
LANE, BETWEEN_LANES, BETWEEN_DEVICES = 22.0, 2.0, 16.0
"""Pixels: height of a lane, between the two lanes of a device, and between devices."""
MEMORY, BETWEEN_CHARTS = 44.0, 62.0
"""Pixels: height of a device's memory curve, and between the two charts."""
NARROW, WIDE = 1080.0, 6000.0
"""Pixels: the least and the largest width of a chart."""
LABELLED = 12.0
"""Width in pixels of a schedule's shortest action, if the chart stays below its largest width."""
CHARACTER = 6.2
"""Pixels: width of a digit."""

HUES = {Kind.F: (42, 111, 176), Kind.B: (227, 154, 27), Kind.I: (207, 91, 46), Kind.W: (31, 156, 127)}
NAMES = {Kind.F: "forward", Kind.B: "backward", Kind.I: "input gradients", Kind.W: "weight gradients"}
PALEST = 0.62
"""Share of white in the colour of a device's last chunk."""
OTHER = "#8a929b"
"""Colour of all other kinds than F, B, I and W: recomputation, reductions, the optimizer step."""

STYLE = f"""
text{{font:11px ui-sans-serif,system-ui,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;fill:#1c2127;
font-variant-numeric:tabular-nums}}
.t{{font-size:18px;font-weight:650}}.s{{fill:#5d6670}}.e{{text-anchor:end}}.m{{text-anchor:middle;font-size:10px}}
.lane{{fill:#f3f1ec}}.grid{{stroke:#e5e2db}}.held{{fill:#2a6fb0;fill-opacity:.22;stroke:#2a6fb0;stroke-width:1.2}}
.limit{{stroke:#b8432f;stroke-dasharray:4 3}}
.other rect{{fill:{OTHER}}}.measured{{fill:none;stroke:#1c2127;stroke-width:1.2}}
""".replace("\n", "")


@frozen
class Axis:
    """Converts times to pixels."""

    length: float
    width: float

    def x(self, time: float) -> float:
        """Pixels from the chart's left edge to a time."""
        return self.width * time / self.length if self.length else 0.0

    def lines(self, height: float) -> Iterator[str]:
        """Grid lines and labels at round times, one in about every 90 pixels, for a chart of this height in pixels."""
        rough = 90 * self.length / self.width
        power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 0.0
        step = next((factor * power for factor in (1, 2, 5, 10) if factor * power >= rough), 0.0)
        for number in range(int(self.length / step * (1 + 1e-9)) + 1 if step else 1):
            x = px(self.x(step * number))
            label = f"{step * number:.6g}"
            yield f'<path class="grid" d="M{x} -4V{px(height)}"/><text class="s m" x="{x}" y="-8">{label}</text>'


@frozen
class Step:
    """One of the steps, in the chart's unit of time.

    Args:
        name: ``predicted`` or ``measured``; empty for a schedule.
        scale: one second in that unit.
    """

    name: str
    trace: Trace
    scale: float

    def computing(self, device: int) -> list[TraceEvent]:
        """The events of the device's compute queue, in order."""
        return [event for event in self.trace.events if event.device == device and event.queue == COMPUTE_QUEUE]

    def saved(self, device: int) -> list[tuple[float, float]]:
        """(time, bytes of saved tensors held from then on), starting with 0 bytes."""
        samples = [s for s in self.trace.memory if s.device == device and s.kind == "saved"]
        return [(0.0, 0.0), *((sample.time_s * self.scale, sample.bytes) for sample in samples)]


def steps_svg(traces: Sequence[Trace], title: str, plain: str | None = None, limit: float | None = None) -> str:
    """The picture of a predicted step, then perhaps the measured one; or of a schedule.

    Args:
        plain: of a schedule, whose times and sizes are in the units of its costs, the line below its heading.
        limit: what a device may hold, in that unit; None for no limit.
    """
    longest = max(trace.step_s for trace in traces)
    unit, scale = ("s", 1.0) if longest >= 1 else ("ms", 1e3)
    names = ("predicted", "measured")
    width = NARROW
    if plain is not None:
        unit, scale, names = "", 1.0, ("", "")
        shortest = min(
            (e.end_s - e.start_s for e in traces[0].events if e.end_s > e.start_s and _drawn(e)), default=0.0
        )
        width = min(max(LABELLED * longest / shortest, NARROW), WIDE) if shortest else NARROW
    steps = tuple(Step(name, trace, scale) for name, trace in zip(names, traces, strict=False))
    devices = max(trace.devices for trace in traces)
    axis = Axis(longest * scale, width)
    gantt = devices * _height(steps)
    memory_top = TOP + gantt + BETWEEN_CHARTS
    memory = devices * (MEMORY + BETWEEN_DEVICES)
    kinds, chunks = _kinds(steps), _chunks(steps, devices)
    drawn = ": filled as predicted, line as measured" if len(steps) > 1 else ""
    drawn = ", in those of one device for one microbatch" if plain is not None else drawn
    parts = [
        *_head(title, _step_text(traces) if plain is None else plain, kinds, other=plain is None),
        f'<g transform="translate({px(LEFT)} {px(TOP)})">',
        *axis.lines(gantt),
        f'<text class="s e" x="-10" y="-8">{unit}</text>',
        *(line for device in range(devices) for line in _lanes(steps, device, chunks, axis)),
        "</g>",
        f'<g transform="translate({px(LEFT)} {px(memory_top)})">',
        f'<text class="s" y="-24">saved tensors{drawn}</text>',
        *axis.lines(memory),
        *_memory(steps, devices, axis, plain is not None, limit),
        "</g>",
    ]
    style = STYLE + _colours(kinds, 1 + max(chunks.values(), default=0))
    return svg_document(title, style, (LEFT + axis.width + RIGHT, memory_top + memory + MARGIN), parts)


def svg_document(title: str, style: str, size: tuple[float, float], parts: Iterable[str]) -> str:
    """The text of a picture with a white background; ``size`` is its width and height in pixels."""
    width, height = map(px, size)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img"><title>{escape(title)}</title><style>{style}</style>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    )
    return "\n".join((*head, *parts, "</svg>")) + "\n"


def px(value: float) -> str:
    """A number of pixels as short text."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _class_name(kind: Kind, chunk: int) -> str:
    """The class that ``_colours`` defines for a kind and a chunk."""
    return f"{kind.value.lower()}{chunk}"


def _colours(kinds: Sequence[Kind], chunks: int) -> str:
    """A style rule for each kind and chunk; labels are white where that is easier to read."""
    rules = []
    for kind in kinds:
        for chunk in range(chunks):
            white = PALEST * chunk / max(chunks - 1, 1)
            red, green, blue = (round(part + (255 - part) * white) for part in HUES[kind])
            name = _class_name(kind, chunk)
            rules.append(f".{name} rect{{fill:rgb({red},{green},{blue})}}")
            # Perceived lightness, ITU-R BT.601.
            if 0.299 * red + 0.587 * green + 0.114 * blue < 140:
                rules.append(f".{name} text{{fill:#fff}}")
    return "".join(rules)


def _kinds(steps: Sequence[Step]) -> list[Kind]:
    used = {event.action.kind for step in steps for event in step.trace.events}
    return [kind for kind in HUES if kind in used]


def _chunks(steps: Sequence[Step], devices: int) -> dict[int, int]:
    """Stage → which of its device's stages it is, from 0."""
    found = {}
    for device in range(devices):
        stages = sorted({event.action.stage for step in steps for event in step.computing(device) if _drawn(event)})
        found.update({stage: chunk for chunk, stage in enumerate(stages)})
    return found


def _drawn(event: TraceEvent) -> bool:
    """Whether the action is F, B, I or W."""
    return event.action.kind in HUES


def _height(steps: Sequence[Step]) -> float:
    """Pixels of a device: its lanes, and the gap below them."""
    return len(steps) * (LANE + BETWEEN_LANES) - BETWEEN_LANES + BETWEEN_DEVICES


def _head(title: str, text: str, kinds: Sequence[Kind], *, other: bool) -> Iterator[str]:
    yield f'<text class="t" x="{px(LEFT)}" y="30">{escape(title)}</text>'
    yield f'<text class="s" x="{px(LEFT)}" y="49">{text}</text>'
    x = LEFT
    names = [(_class_name(kind, 0), f"{kind.value} {NAMES[kind]}") for kind in kinds]
    names += [("other", "recomputation, reductions, optimizer step")] if other else []
    for name, label in names:
        yield f'<g class="{name}"><rect x="{px(x)}" y="60" width="11" height="11"/></g>'
        yield f'<text x="{px(x + 16)}" y="70">{label}</text>'
        x += 16 + CHARACTER * len(label) + 16


def _step_text(traces: Sequence[Trace]) -> str:
    if len(traces) == 1:
        return f"step {traces[0].step_s:.4g} s, predicted"
    compared = compare(*traces)
    text = f"step predicted {compared.step.predicted:.4g} s, measured {compared.step.measured:.4g} s"
    if compared.step.error is not None:
        text += f": {signed_percent(compared.step.error)}"
    return text


def _lanes(steps: Sequence[Step], device: int, chunks: dict[int, int], axis: Axis) -> Iterator[str]:
    """A device's lanes, one for each step."""
    top = device * _height(steps)
    yield f'<text x="{px(12 - LEFT)}" y="{px(top + (_height(steps) - BETWEEN_DEVICES) / 2 + 4)}">device {device}</text>'
    for row, step in enumerate(steps):
        y = top + row * (LANE + BETWEEN_LANES)
        events = step.computing(device)
        yield f'<text class="s e" x="-10" y="{px(y + LANE / 2 + 4)}">{step.name}</text>'
        yield f'<rect class="lane" y="{px(y)}" width="{px(axis.width)}" height="{px(LANE)}"/>'
        yield from (_action(event, step, chunks, axis, y) for event in events)
        busy = sum(event.end_s - event.start_s for event in events if _drawn(event))
        idle = bubble_ratio(busy, step.trace.step_s)
        yield f'<text class="s" x="{px(axis.width + 8)}" y="{px(y + LANE / 2 + 4)}">{idle:.1%} bubble</text>'


def _action(event: TraceEvent, step: Step, chunks: dict[int, int], axis: Axis, y: float) -> str:
    action = event.action
    start, end = event.start_s * step.scale, event.end_s * step.scale
    left, width = axis.x(start), max(axis.x(end) - axis.x(start) - 0.6, 0.4)
    label = str(action.microbatch) if _drawn(event) else ""
    written = (
        f'<text class="m" x="{px(left + width / 2)}" y="{px(y + LANE / 2 + 3.6)}">{label}</text>'
        if label and width >= CHARACTER * len(label) + 1
        else ""
    )
    name = _class_name(action.kind, chunks[action.stage]) if _drawn(event) else "other"
    whose = f", {step.name}" if step.name else ""
    return (
        f'<g class="a {name}"><title>{action}{whose}: {start:.5g} to {end:.5g}</title><rect x="{px(left)}" '
        f'y="{px(y)}" width="{px(width)}" height="{px(LANE)}"/>{written}</g>'
    )


def _memory(steps: Sequence[Step], devices: int, axis: Axis, plain: bool, limit: float | None) -> Iterator[str]:
    curves = [[step.saved(device) for step in steps] for device in range(devices)]
    held_most = max((held for pair in curves for curve in pair for _, held in curve), default=0.0)
    most = max(held_most, limit or 0.0) or 1.0
    for device, pair in enumerate(curves):
        bottom = device * (MEMORY + BETWEEN_DEVICES) + MEMORY
        yield f'<text x="{px(12 - LEFT)}" y="{px(bottom - MEMORY / 2 + 4)}">device {device}</text>'
        yield f'<rect class="lane" y="{px(bottom - MEMORY)}" width="{px(axis.width)}" height="{px(MEMORY)}"/>'
        peaks = []
        for name, step, curve in zip(("held", "measured"), steps, pair, strict=False):
            path = "".join(f"H{px(axis.x(time))}V{px(bottom - MEMORY * held / most)}" for time, held in curve)
            end = px(axis.x(step.trace.step_s * step.scale))
            close = f"V{px(bottom)}Z" if name == "held" else ""
            yield f'<path class="{name}" d="M0 {px(bottom)}{path}H{end}{close}"/>'
            peak = max(held for _, held in curve)
            peaks.append(f"{peak:.4g}" if plain else f"{peak / 1e6:.1f} MB")
        if limit is not None:
            yield f'<path class="limit" d="M0 {px(bottom - MEMORY * limit / most)}H{px(axis.width)}"/>'
        ends = [",", ""] if len(peaks) > 1 else [""]
        texts = [f"{word} {peak}{end}" for word, peak, end in zip(("peak", "measured"), peaks, ends, strict=False)]
        for text, y in zip(texts, (-2, 13), strict=False):
            yield f'<text class="s" x="{px(axis.width + 8)}" y="{px(bottom - MEMORY / 2 + y)}">{text}</text>'
