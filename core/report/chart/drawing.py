"""A schedule as an SVG: a Gantt chart of all devices, and below it the memory of each, over one time axis.

The SVG is self-contained. Hovering over an action shows its stage, microbatch and times. A bar above each device shows
warm-up, steady state and cool-down.
"""

from collections.abc import Iterator, Sequence
from html import escape

from ...actions import Action, Kind
from ...ratios import bubble_ratio
from ...schedules.scored import Scored
from .curve import curves_of, phases
from .elements import HUES, NAMES, STYLE, class_name, colours, px, time_axis
from .layout import CHARACTER, GAP, HELD, LANE, LEFT, MARGIN, PHASE, TOP, Axis, layout_of

PHASES = (("warm-up", "#a9bdd6"), ("steady state", "#59616b"), ("cool-down", "#d8bfa6"))


def schedule_svg(scored: Scored) -> str:
    """The picture of a schedule. The same input gives the same bytes.

    Args:
        scored: the schedule with its evaluation. Times keep its unit; memory is drawn in one device's saved tensors for
            one microbatch.
    """
    layout = layout_of(scored)
    width, height = px(layout.width), px(layout.height + MARGIN)
    chunks = 1 + max(_chunks(scored.schedule.placement))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img">',
        f"<title>{escape(scored.schedule.name)}</title><style>{STYLE}{colours(_kinds(scored), chunks)}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        *_head(scored),
        f'<g transform="translate({px(LEFT)} {px(TOP)})">',
        *time_axis(layout.axis, layout.gantt),
        *_lanes(scored, layout.axis),
        "</g>",
        f'<g transform="translate({px(LEFT)} {px(layout.memory_top(0))})">',
        '<text class="s" y="-22">saved tensors, in those of one device for one microbatch</text>',
        *time_axis(layout.axis, layout.memory),
        *_memory(scored, layout.axis),
        "</g></svg>",
    ]
    return "\n".join(parts) + "\n"


def _kinds(scored: Scored) -> list[Kind]:
    used = {action.kind for actions in scored.schedule.device_actions for action in actions}
    return [kind for kind in HUES if kind in used]


def _chunks(placement: Sequence[int]) -> list[int]:
    """Per stage its chunk: its index among its device's stages, from 0."""
    return [placement[:stage].count(device) for stage, device in enumerate(placement)]


def _head(scored: Scored) -> Iterator[str]:
    result, problem = scored.result, scored.problem
    peak = max(result.peak_memory) / problem.chunks
    yield f'<text class="t" x="{px(LEFT)}" y="30">{escape(scored.schedule.name)}</text>'
    limit = "" if problem.memory_limit is None else f" of at most {problem.memory_limit / problem.chunks:.4g}"
    yield (
        f'<text class="s" x="{px(LEFT)}" y="49">{problem.devices} devices · {problem.microbatches} microbatches · '
        f"makespan {result.makespan:.6g} · bubble {result.bubble_ratio:.1%} · peak {peak:.4g}{limit}</text>"
    )
    x = LEFT
    chunks = 1 + max(_chunks(scored.schedule.placement))
    for kind in _kinds(scored):
        for chunk in range(chunks):
            yield f'<g class="{class_name(kind, chunk)}"><rect x="{px(x)}" y="60" width="11" height="11"/></g>'
            x += 12
        yield f'<text x="{px(x + 4)}" y="70">{kind.value} {NAMES[kind]}</text>'
        x += 4 + CHARACTER * (len(NAMES[kind]) + 2) + 16
    if chunks > 1:
        yield f'<text class="s" x="{px(x)}" y="70">paler: a device\'s later stages</text>'
        x += 150 + 16
    for name, colour in PHASES:
        yield f'<rect x="{px(x)}" y="63" width="18" height="{px(PHASE)}" fill="{colour}"/>'
        yield f'<text x="{px(x + 23)}" y="70">{name}</text>'
        x += 23 + CHARACTER * len(name) + 14


def _lanes(scored: Scored, axis: Axis) -> Iterator[str]:
    chunks = _chunks(scored.schedule.placement)
    result = scored.result
    for device, actions in enumerate(scored.schedule.device_actions):
        y = device * (PHASE + LANE + GAP)
        starts, ends = result.starts[device], result.ends[device]
        yield f'<text class="e" x="-10" y="{px(y + PHASE + LANE / 2 + 4)}">{device}</text>'
        yield f'<rect class="lane" y="{px(y + PHASE)}" width="{px(axis.width)}" height="{px(LANE)}"/>'
        if not actions:
            continue
        moments = phases(actions, starts, ends)
        spans = ((moments.start, moments.steady), (moments.steady, moments.cooling), (moments.cooling, moments.end))
        for (name, colour), (start, end) in zip(PHASES, spans, strict=True):
            left, right = axis.x(start), axis.x(end)
            if right > left:
                yield (
                    f'<rect x="{px(left)}" y="{px(y)}" width="{px(right - left)}" height="{px(PHASE)}" '
                    f'fill="{colour}"><title>{name} of device {device}: {start:.6g} to {end:.6g}</title></rect>'
                )
        idle = bubble_ratio(result.busy[device], result.makespan)
        yield f'<text class="s" x="{px(axis.width + 8)}" y="{px(y + PHASE + LANE / 2 + 4)}">{idle:.1%} idle</text>'
        for action, start, end in zip(actions, starts, ends, strict=True):
            yield _action(action, chunks[action.stage], device, (start, end), (axis.x(start), axis.x(end)), y + PHASE)


def _action(
    action: Action, chunk: int, device: int, times: tuple[float, float], span: tuple[float, float], y: float
) -> str:
    left, right = span
    width = max(right - left - 0.6, 0.4)
    text = str(action.microbatch)
    label = (
        f'<text class="m" x="{px(left + width / 2)}" y="{px(y + LANE / 2 + 3.6)}">{text}</text>'
        if width >= CHARACTER * len(text) + 1
        else ""
    )
    return (
        f'<g class="a {class_name(action.kind, chunk)}" data-m="{action.microbatch}">'
        f"<title>{action}: {NAMES[action.kind]} of stage {action.stage}, microbatch {action.microbatch}, on device "
        f'{device}, {times[0]:.6g} to {times[1]:.6g}</title><rect x="{px(left)}" y="{px(y)}" width="{px(width)}" '
        f'height="{px(LANE)}"/>{label}</g>'
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
            return px(bottom - HELD * held / most)

        steps = "".join(f"H{px(axis.x(time))}V{y(held)}" for time, held in curve[1:])
        yield f'<text class="e" x="-10" y="{px(bottom - 4)}">{device}</text>'
        yield f'<rect class="lane" y="{px(top)}" width="{px(axis.width)}" height="{px(HELD)}"/>'
        yield (
            f'<path class="held" d="M0 {px(bottom)}{steps}V{px(bottom)}Z"><title>device {device} holds at most '
            f"{peak:.4g}</title></path>"
        )
        if limit is not None:
            yield f'<path class="limit" d="M0 {y(limit)}H{px(axis.width)}"/>'
        yield f'<path class="peak" d="M0 {y(peak)}H{px(axis.width)}"/>'
        yield f'<text class="s" x="{px(axis.width + 8)}" y="{px(bottom - 4)}">{peak:.4g} peak</text>'
