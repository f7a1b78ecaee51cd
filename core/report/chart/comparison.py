"""A step as an SVG, or a predicted and a measured one: a lane per device and step, and below the saved tensors."""

from collections.abc import Iterator, Sequence
from html import escape

from attrs import frozen

from ...actions import Kind
from ...ratios import bubble_ratio
from ...trace.compare import compare
from ...trace.trace import COMPUTE_QUEUE, Trace, TraceEvent
from .elements import HUES, NAMES, STYLE, class_name, colours, px, time_axis
from .layout import CHARACTER, NARROW, Axis

LEFT, RIGHT, TOP, MARGIN = 132.0, 150.0, 104.0, 16.0
"""Pixels around the charts."""
LANE, BETWEEN_LANES, BETWEEN_DEVICES = 22.0, 2.0, 16.0
"""Pixels: height of a lane, between the two lanes of a device, and between devices."""
MEMORY, BETWEEN_CHARTS = 44.0, 62.0
"""Pixels: height of a device's memory curve, and between the two charts."""
OTHER = "#8a929b"
"""Colour of all other kinds than F, B, I and W: recomputation, reductions, the optimizer step."""
MEASURED_STYLE = f".other rect{{fill:{OTHER}}}.measured{{fill:none;stroke:#1c2127;stroke-width:1.2}}"


@frozen
class Step:
    """One of the two steps, in the chart's unit of time.

    Args:
        name: ``predicted`` or ``measured``.
        trace: the step.
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


def comparison_svg(predicted: Trace, measured: Trace, title: str) -> str:
    """The picture of a step as it was predicted and as it was measured. The same input gives the same bytes.

    Args:
        predicted, measured: traces of the same plan.
        title: the heading.
    """
    return _steps_svg((predicted, measured), title)


def step_svg(predicted: Trace, title: str) -> str:
    """The picture of a predicted step alone. The same input gives the same bytes."""
    return _steps_svg((predicted,), title)


def _steps_svg(traces: Sequence[Trace], title: str) -> str:
    longest = max(trace.step_s for trace in traces)
    unit, scale = ("s", 1.0) if longest >= 1 else ("ms", 1e3)
    steps = tuple(Step(name, trace, scale) for name, trace in zip(("predicted", "measured"), traces, strict=False))
    devices = max(trace.devices for trace in traces)
    axis = Axis(longest * scale, NARROW)
    gantt = devices * _height(steps)
    memory_top = TOP + gantt + BETWEEN_CHARTS
    memory = devices * (MEMORY + BETWEEN_DEVICES)
    width, height = px(LEFT + axis.width + RIGHT), px(memory_top + memory + MARGIN)
    kinds, chunks = _kinds(steps), _chunks(steps, devices)
    drawn = ": filled as predicted, line as measured" if len(steps) > 1 else ""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img">',
        f"<title>{escape(title)}</title><style>{STYLE}{MEASURED_STYLE}"
        f"{colours(kinds, 1 + max(chunks.values(), default=0))}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        *_head(title, steps, kinds),
        f'<g transform="translate({px(LEFT)} {px(TOP)})">',
        *time_axis(axis, gantt),
        f'<text class="s e" x="-10" y="-8">{unit}</text>',
        *(line for device in range(devices) for line in _lanes(steps, device, chunks, axis)),
        "</g>",
        f'<g transform="translate({px(LEFT)} {px(memory_top)})">',
        f'<text class="s" y="-24">saved tensors{drawn}</text>',
        *time_axis(axis, memory),
        *_memory(steps, devices, axis),
        "</g></svg>",
    ]
    return "\n".join(parts) + "\n"


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


def _head(title: str, steps: Sequence[Step], kinds: Sequence[Kind]) -> Iterator[str]:
    text = _step_text([step.trace for step in steps])
    yield f'<text class="t" x="{px(LEFT)}" y="30">{escape(title)}</text>'
    yield f'<text class="s" x="{px(LEFT)}" y="49">{text}</text>'
    x = LEFT
    names = [(class_name(kind, 0), f"{kind.value} {NAMES[kind]}") for kind in kinds]
    for name, label in (*names, ("other", "recomputation, reductions, optimizer step")):
        yield f'<g class="{name}"><rect x="{px(x)}" y="60" width="11" height="11"/></g>'
        yield f'<text x="{px(x + 16)}" y="70">{label}</text>'
        x += 16 + CHARACTER * len(label) + 16


def _step_text(traces: Sequence[Trace]) -> str:
    if len(traces) == 1:
        return f"step {traces[0].step_s:.4g} s, predicted"
    compared = compare(*traces)
    text = f"step predicted {compared.step.predicted:.4g} s, measured {compared.step.measured:.4g} s"
    if compared.step.error is not None:
        text += f": {compared.step.error:+.1%}"
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
    name = class_name(action.kind, chunks[action.stage]) if _drawn(event) else "other"
    return (
        f'<g class="{name}"><title>{action}, {step.name}: {start:.5g} to {end:.5g}</title><rect x="{px(left)}" '
        f'y="{px(y)}" width="{px(width)}" height="{px(LANE)}"/>{written}</g>'
    )


def _memory(steps: Sequence[Step], devices: int, axis: Axis) -> Iterator[str]:
    curves = [[step.saved(device) for step in steps] for device in range(devices)]
    most = max((held for pair in curves for curve in pair for _, held in curve), default=0.0) or 1.0
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
            peaks.append(f"{max(held for _, held in curve) / 1e6:.1f}")
        words = ["peak ", "measured "]
        ends = [",", ""] if len(peaks) > 1 else [""]
        texts = [f"{word}{peak} MB{end}" for word, peak, end in zip(words, peaks, ends, strict=False)]
        for text, y in zip(texts, (-2, 13), strict=False):
            yield f'<text class="s" x="{px(axis.width + 8)}" y="{px(bottom - MEMORY / 2 + y)}">{text}</text>'
