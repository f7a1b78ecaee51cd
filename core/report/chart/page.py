"""An HTML page with the picture of a schedule: figures, a table of the devices, and details on hover.

One self-contained file; its picture is the same SVG as that of ``schedule_svg``, and is complete without scripts.
"""

import json
from html import escape
from string import Template
from typing import Any

from ...schedules.scored import Scored
from ..html_document import html_document, read_template
from .curve import curves_of
from .drawing import schedule_svg
from .layout import HELD, LEFT, TOP, layout_of


def schedule_html(scored: Scored) -> str:
    """The page of a schedule. The same input gives the same bytes; arguments as in ``schedule_svg``."""
    body = Template(_template("page.html")).substitute(
        title=escape(scored.schedule.name),
        figures="\n".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in _figures(scored)),
        rows="\n".join(_rows(scored)),
        svg=schedule_svg(scored),
        data=json.dumps(_data(scored), separators=(",", ":")),
        script=_template("page.js"),
    )
    return html_document(scored.schedule.name, _template("page.css"), body.rstrip("\n"))


def _figures(scored: Scored) -> list[tuple[str, str]]:
    result, problem = scored.result, scored.problem
    limit = problem.memory_limit
    return [
        ("makespan", f"{result.makespan:.6g}"),
        ("bubble", f"{result.bubble_ratio:.1%}"),
        ("stage span", f"{result.stage_span:.6g}"),
        ("peak memory", f"{max(result.peak_memory) / problem.chunks:.4g}"),
        ("memory limit", "none" if limit is None else f"{limit / problem.chunks:.4g}"),
        ("devices", str(problem.devices)),
        ("microbatches", str(problem.microbatches)),
        ("stages", str(len(scored.schedule.placement))),
    ]


def _rows(scored: Scored) -> list[str]:
    result, problem, placement = scored.result, scored.problem, scored.schedule.placement
    return [
        "<tr>"
        + "".join(
            f"<td>{cell}</td>"
            for cell in (
                device,
                ", ".join(str(stage) for stage, holder in enumerate(placement) if holder == device),
                len(actions),
                f"{busy:.6g}",
                f"{1 - busy / result.makespan if result.makespan else 0.0:.1%}",
                f"{peak / problem.chunks:.4g}",
            )
        )
        + "</tr>"
        for device, (actions, busy, peak) in enumerate(
            zip(scored.schedule.device_actions, result.busy, result.peak_memory, strict=True)
        )
    ]


def _data(scored: Scored) -> dict[str, Any]:
    """The charts' positions in the picture's pixels, and each device's memory over time."""
    layout = layout_of(scored)
    return {
        "makespan": scored.result.makespan,
        "left": LEFT,
        "width": layout.axis.width,
        "top": TOP,
        "bottom": layout.height,
        "lanes": [layout.memory_top(device) + HELD / 2 + 4 for device in range(scored.problem.devices)],
        "curves": curves_of(scored),
    }


def _template(name: str) -> str:
    return read_template(__package__, name)
