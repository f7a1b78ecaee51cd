"""The report page: template, data and scripts in one self-contained HTML file.

Python computes the data, and the scripts draw it. The scripts of ``TOOLS`` are a page's own scope; those of ``DRAWING``
together are the body of one function, ``drawReport(DATA, ROOT, view)``, so that a page can have several reports.

Data too large for a browser are made smaller step by step, with a note for each step.
"""

import json
from collections.abc import Callable
from html import escape
from importlib.resources import files
from itertools import compress, pairwise
from pathlib import Path
from string import Template
from typing import Any

from ..actions import COMM_KINDS
from ..files.write import write_text
from ..plan.plan import Plan
from ..trace.trace import Trace, is_message_queue
from .data import ReportFacts, report_data

TOOLS = ("format.js", "colours.js", "view.js")
DRAWING = (
    "units.js", "canvas.js", "gantt.js", "memory.js", "links.js", "idle.js", "curves.js", "tables.js", "panel.js",
)  # fmt: skip
MOST_BYTES = 50_000_000
"""Size of a page's data above which it is reduced, because browsers become slow."""


def write_report(
    path: str | Path,
    *,
    plan: Plan | None,
    predicted: Trace,
    measured: Trace | None = None,
    facts: ReportFacts | None = None,
) -> None:
    """Write the report to one HTML file. The same input gives the same bytes.

    Data of more than 50 MB is reduced, and the page says how.

    Args:
        path: of the file.
        plan: the plan of both traces; None omits its part of the page.
        predicted: the simulated step.
        measured: a measured step; without it the page shows only the prediction.
        facts: further contents.
    """
    write_text(path, report_html(plan=plan, predicted=predicted, measured=measured, facts=facts))


def report_html(
    *, plan: Plan | None, predicted: Trace, measured: Trace | None = None, facts: ReportFacts | None = None
) -> str:
    """The report's text; arguments as in ``write_report``."""
    return page_of(report_data(plan, predicted, measured, facts or ReportFacts()))


def page_of(data: dict[str, Any]) -> str:
    """The page that shows the data of ``report_data``."""
    title = str(data["title"])
    body = Template(_template("page.html")).substitute(
        title=escape(title),
        sections=sections(),
        data=embedded(reduced_data(data, MOST_BYTES)),
        script="\n".join((drawing_script(), _template("report.js"))),
    )
    return html_document(title, style(), body.rstrip("\n"), color_scheme="light dark")


def drawing_script() -> str:
    """The scripts that draw reports: helpers, ``timeView()``, and ``drawReport(DATA, ROOT, view)``."""
    body = "\n".join(_template(name) for name in DRAWING)
    tools = "\n".join(_template(name) for name in TOOLS)
    return f"{tools}\nfunction drawReport(DATA, ROOT, view) {{\n{body}}}\n"


def sections() -> str:
    """The HTML of a report, empty: ``drawReport`` fills it."""
    return _template("sections.html").rstrip("\n")


def style() -> str:
    """The style sheet of reports, and of pages that have one."""
    return _template("page.css")


def embedded(data: Any) -> str:
    """Data as JSON for a script element."""
    # "</script>" inside a string must not end the element that holds the data.
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def html_document(title: str, style: str, body: str, color_scheme: str = "light", *, connects: bool = False) -> str:
    """The text of a document that loads nothing from elsewhere.

    Args:
        color_scheme: the color schemes that the style supports, as in CSS.
        connects: whether its scripts may send requests to the server that it came from.
    """
    return Template(_template("document.html")).substitute(
        title=escape(title),
        style=style,
        body=body,
        color_scheme=color_scheme,
        connects="; connect-src 'self'" if connects else "",
    )


def read_template(package: str | None, name: str) -> str:
    """The text of a template, style or script of a package."""
    assert package is not None
    return files(package).joinpath("assets", name).read_text(encoding="utf-8")


def _template(name: str) -> str:
    return read_template(__package__, name)


SAMPLES = 2000
"""Most memory samples of a device, and rates of a link, that are kept."""


def reduced_data(data: dict[str, Any], most_bytes: int) -> dict[str, Any]:
    """The data itself if it is small enough, otherwise a smaller copy with a note about what was removed.

    Args:
        most_bytes: largest size as JSON; exceeded only if the actions of a single device are larger.
    """
    full = _size(data)
    if full <= most_bytes:
        return data
    data = json.loads(json.dumps(data))
    notes = [f"no messages between devices; of memory and rates {SAMPLES} samples, each the highest of its time"]
    for link in data["links"]:
        link["times"], link["rates"] = _highest(link["times"], link["rates"], float)
    kinds = {kind.value for kind in COMM_KINDS}
    for trace in data["traces"]:
        for memory in (trace["memory"], trace["host"]):
            rows = [_highest(*row, sum) for row in zip(memory["times"], memory["held"], strict=True)]
            memory["times"], memory["held"] = [times for times, _ in rows], [held for _, held in rows]
        _keep_events(trace, [kind not in kinds for kind in trace["events"]["kind"]])
    data["queues"] = [[name for name in queues if not is_message_queue(name)] for queues in data["queues"]]
    count = wanted = len(data["queues"])
    while (size := _size(data)) > most_bytes and wanted > 1:
        wanted = max(min(int(wanted * most_bytes / size * 0.9), wanted - 1), 1)
        kept = {round(i * (count - 1) / max(wanted - 1, 1)) for i in range(wanted)}
        notes[1:] = [f"the actions of {len(kept)} of {count} devices"]
        for trace in data["traces"]:
            _keep_events(trace, [device in kept for device in trace["events"]["device"]])
            memory = trace["memory"]
            for name in ("times", "held"):
                memory[name] = [row if device in kept else row[:1] for device, row in enumerate(memory[name])]
    said = f"With everything this page has {full / 1e6:.0f} MB of data, which is slow to open. Only this is kept: "
    data["notes"] = [said + "; ".join(notes) + ".", *data["notes"]]
    return data


def _size(data: dict[str, Any]) -> int:
    return len(json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode())


def _highest(times: list[float], values: list[Any], height: Callable[[Any], float]) -> tuple[list[float], list[Any]]:
    """The first sample, and the highest one of each of ``SAMPLES`` equal runs."""
    count = len(values)
    if count <= SAMPLES:
        return times, values
    bounds = pairwise(count * i // SAMPLES for i in range(SAMPLES + 1))
    kept = [max(range(start, end), key=lambda i: height(values[i])) if start else 0 for start, end in bounds]
    return [times[i] for i in kept], [values[i] for i in kept]


def _keep_events(trace: dict[str, Any], keep: list[bool]) -> None:
    trace["events"] = {name: list(compress(column, keep)) for name, column in trace["events"].items()}
