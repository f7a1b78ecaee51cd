"""A schedule as an SVG: a Gantt chart of all devices, and below it what each of them holds, over one time axis.

The picture stands alone: it loads nothing, and tells of every action what it is when it is pointed at. Kinds have the
hues of Okabe and Ito, a device's later chunks are paler, a bar over each device tells warm-up, steady state and
cool-down apart.
"""

from collections.abc import Iterator, Sequence
from html import escape

from ...actions import Action, Kind
from ...schedules.scored import Scored
from .curve import curves_of, phases
from .layout import CHARACTER, GAP, HELD, LANE, LEFT, MARGIN, PHASE, TOP, Axis, layout_of

HUES = {Kind.F: (42, 111, 176), Kind.B: (227, 154, 27), Kind.I: (207, 91, 46), Kind.W: (31, 156, 127)}
NAMES = {Kind.F: "forward", Kind.B: "backward", Kind.I: "input gradients", Kind.W: "weight gradients"}
PALEST = 0.62
"""How much white a device's last chunk has in its colour."""
PHASES = (("warm-up", "#a9bdd6"), ("steady state", "#59616b"), ("cool-down", "#d8bfa6"))

STYLE = """
text{font:11px ui-sans-serif,system-ui,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;fill:#1c2127;
font-variant-numeric:tabular-nums}
.t{font-size:18px;font-weight:650}.s{fill:#5d6670}.e{text-anchor:end}.m{text-anchor:middle;font-size:10px}
.lane{fill:#f3f1ec}.grid{stroke:#e5e2db}.held{fill:#2a6fb0;fill-opacity:.22;stroke:#2a6fb0;stroke-width:1.2}
.limit{stroke:#b8432f;stroke-dasharray:4 3}.peak{stroke:#2a6fb0;stroke-opacity:.45;stroke-dasharray:1 3}
""".replace("\n", "")


def schedule_svg(scored: Scored) -> str:
    """The picture of a schedule. The same input gives the same bytes.

    Args:
        scored: the schedule with its evaluation. Times keep its unit; memory is drawn in one device's saved tensors for
            one microbatch.
    """
    layout = layout_of(scored)
    width, height = _n(layout.width), _n(layout.height + MARGIN)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img">',
        f"<title>{escape(scored.schedule.name)}</title><style>{STYLE}{_colours(scored)}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        *_head(scored),
        f'<g transform="translate({_n(LEFT)} {_n(TOP)})">',
        *_axis(layout.axis, layout.gantt),
        *_lanes(scored, layout.axis),
        "</g>",
        f'<g transform="translate({_n(LEFT)} {_n(layout.memory_top(0))})">',
        '<text class="s" y="-22">saved tensors, in those of one device for one microbatch</text>',
        *_axis(layout.axis, layout.memory),
        *_memory(scored, layout.axis),
        "</g></svg>",
    ]
    return "\n".join(parts) + "\n"


def _n(value: float) -> str:
    """A number of pixels, short."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _kinds(scored: Scored) -> list[Kind]:
    used = {action.kind for actions in scored.schedule.device_actions for action in actions}
    return [kind for kind in HUES if kind in used]


def _chunks(placement: Sequence[int]) -> list[int]:
    """Per stage which of its device's stages it is, from 0."""
    return [placement[:stage].count(device) for stage, device in enumerate(placement)]


def _colour(kind: Kind, chunk: int, chunks: int) -> tuple[int, ...]:
    white = PALEST * chunk / max(chunks - 1, 1)
    return tuple(round(part + (255 - part) * white) for part in HUES[kind])


def _colours(scored: Scored) -> str:
    """A class for each kind and chunk; labels are white where that reads better."""
    chunks = 1 + max(_chunks(scored.schedule.placement))
    rules = []
    for kind in _kinds(scored):
        for chunk in range(chunks):
            red, green, blue = _colour(kind, chunk, chunks)
            name = f"{kind.value.lower()}{chunk}"
            rules.append(f".{name} rect{{fill:rgb({red},{green},{blue})}}")
            # Perceived lightness, ITU-R BT.601.
            if 0.299 * red + 0.587 * green + 0.114 * blue < 140:
                rules.append(f".{name} text{{fill:#fff}}")
    return "".join(rules)


def _head(scored: Scored) -> Iterator[str]:
    result, problem = scored.result, scored.problem
    peak = max(result.peak_memory) / problem.chunks
    yield f'<text class="t" x="{_n(LEFT)}" y="30">{escape(scored.schedule.name)}</text>'
    limit = "" if problem.memory_limit is None else f" of at most {problem.memory_limit / problem.chunks:.4g}"
    yield (
        f'<text class="s" x="{_n(LEFT)}" y="49">{problem.devices} devices · {problem.microbatches} microbatches · '
        f"makespan {result.makespan:.6g} · bubble {result.bubble_ratio:.1%} · peak {peak:.4g}{limit}</text>"
    )
    x = LEFT
    chunks = 1 + max(_chunks(scored.schedule.placement))
    for kind in _kinds(scored):
        for chunk in range(chunks):
            yield f'<g class="{kind.value.lower()}{chunk}"><rect x="{_n(x)}" y="60" width="11" height="11"/></g>'
            x += 12
        yield f'<text x="{_n(x + 4)}" y="70">{kind.value} {NAMES[kind]}</text>'
        x += 4 + CHARACTER * (len(NAMES[kind]) + 2) + 16
    if chunks > 1:
        yield f'<text class="s" x="{_n(x)}" y="70">paler: a device\'s later stages</text>'
        x += 150 + 16
    for name, colour in PHASES:
        yield f'<rect x="{_n(x)}" y="63" width="18" height="{_n(PHASE)}" fill="{colour}"/>'
        yield f'<text x="{_n(x + 23)}" y="70">{name}</text>'
        x += 23 + CHARACTER * len(name) + 14


def _axis(axis: Axis, height: float) -> Iterator[str]:
    for time in axis.ticks():
        x = _n(axis.x(time))
        yield f'<path class="grid" d="M{x} -4V{_n(height)}"/><text class="s m" x="{x}" y="-8">{time:.6g}</text>'


def _lanes(scored: Scored, axis: Axis) -> Iterator[str]:
    chunks = _chunks(scored.schedule.placement)
    result = scored.result
    for device, actions in enumerate(scored.schedule.device_actions):
        y = device * (PHASE + LANE + GAP)
        starts, ends = result.starts[device], result.ends[device]
        yield f'<text class="e" x="-10" y="{_n(y + PHASE + LANE / 2 + 4)}">{device}</text>'
        yield f'<rect class="lane" y="{_n(y + PHASE)}" width="{_n(axis.width)}" height="{_n(LANE)}"/>'
        if not actions:
            continue
        moments = phases(actions, starts, ends)
        spans = ((moments.start, moments.steady), (moments.steady, moments.cooling), (moments.cooling, moments.end))
        for (name, colour), (start, end) in zip(PHASES, spans, strict=True):
            left, right = axis.x(start), axis.x(end)
            if right > left:
                yield (
                    f'<rect x="{_n(left)}" y="{_n(y)}" width="{_n(right - left)}" height="{_n(PHASE)}" '
                    f'fill="{colour}"><title>{name} of device {device}: {start:.6g} to {end:.6g}</title></rect>'
                )
        idle = 1 - result.busy[device] / result.makespan if result.makespan else 0.0
        yield f'<text class="s" x="{_n(axis.width + 8)}" y="{_n(y + PHASE + LANE / 2 + 4)}">{idle:.1%} idle</text>'
        for action, start, end in zip(actions, starts, ends, strict=True):
            yield _action(action, chunks[action.stage], device, (start, end), (axis.x(start), axis.x(end)), y + PHASE)


def _action(
    action: Action, chunk: int, device: int, times: tuple[float, float], span: tuple[float, float], y: float
) -> str:
    left, right = span
    width = max(right - left - 0.6, 0.4)
    text = str(action.microbatch)
    label = (
        f'<text class="m" x="{_n(left + width / 2)}" y="{_n(y + LANE / 2 + 3.6)}">{text}</text>'
        if width >= CHARACTER * len(text) + 1
        else ""
    )
    return (
        f'<g class="a {action.kind.value.lower()}{chunk}" data-m="{action.microbatch}">'
        f"<title>{action}: {NAMES[action.kind]} of stage {action.stage}, microbatch {action.microbatch}, on device "
        f'{device}, {times[0]:.6g} to {times[1]:.6g}</title><rect x="{_n(left)}" y="{_n(y)}" width="{_n(width)}" '
        f'height="{_n(LANE)}"/>{label}</g>'
    )


def _memory(scored: Scored, axis: Axis) -> Iterator[str]:
    chunks = scored.problem.chunks
    peaks = [peak / chunks for peak in scored.result.peak_memory]
    limit = None if scored.problem.memory_limit is None else scored.problem.memory_limit / chunks
    most = max(*peaks, limit or 0.0, 1e-9)
    for device, (curve, peak) in enumerate(zip(curves_of(scored), peaks, strict=True)):
        top = device * (HELD + GAP)
        bottom = top + HELD

        def y(held: float, bottom: float = bottom) -> str:
            return _n(bottom - HELD * held / most)

        steps = "".join(f"H{_n(axis.x(time))}V{y(held)}" for time, held in curve[1:])
        yield f'<text class="e" x="-10" y="{_n(bottom - 4)}">{device}</text>'
        yield f'<rect class="lane" y="{_n(top)}" width="{_n(axis.width)}" height="{_n(HELD)}"/>'
        yield (
            f'<path class="held" d="M0 {_n(bottom)}{steps}V{_n(bottom)}Z"><title>device {device} holds at most '
            f"{peak:.4g}</title></path>"
        )
        if limit is not None:
            yield f'<path class="limit" d="M0 {y(limit)}H{_n(axis.width)}"/>'
        yield f'<path class="peak" d="M0 {y(peak)}H{_n(axis.width)}"/>'
        yield f'<text class="s" x="{_n(axis.width + 8)}" y="{_n(bottom - 4)}">{peak:.4g} peak</text>'
