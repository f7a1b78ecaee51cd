"""The report page: template, data and scripts in one self-contained HTML file.

Python computes the data, and the scripts draw it. The scripts of ``TOOLS`` are a page's own scope; those of ``DRAWING``
together are the body of one function, ``drawReport(DATA, ROOT, view)``, so that a page can have several reports.

Data too large for a browser are made smaller step by step, with a note for each step.
"""

import json
from collections.abc import Callable, Iterator
from html import escape
from itertools import pairwise
from pathlib import Path
from string import Template
from typing import Any

from ..actions import COMM_KINDS
from ..files.write import write_text
from ..plan.plan import Plan
from ..trace.trace import Trace, is_message_queue
from .data import report_data
from .facts import ReportFacts
from .html_document import html_document, read_template

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


def _template(name: str) -> str:
    return read_template(__package__, name)


SAMPLES = 2000
"""Most memory samples of a device, and rates of a link, that are kept."""

Data = dict[str, Any]
Reduction = Callable[[Data], str | None]
"""Makes data smaller in place, and returns a note about it; None if nothing was removed."""


def reduced_data(data: Data, most_bytes: int) -> Data:
    """The data itself if it is small enough, otherwise a smaller copy with notes about what was removed.

    Args:
        data: the result of ``report_data``.
        most_bytes: largest size as JSON; exceeded only if the actions of a single device are larger.
    """
    size = _size(data)
    if size <= most_bytes:
        return data
    data = json.loads(json.dumps(data))
    full, notes = size, []
    for reduce in (_reduce_rates, _reduce_memory, _without_messages, lambda each: _fewer_devices(each, most_bytes)):
        note = reduce(data)
        if note is not None:
            notes.append(note)
        if _size(data) <= most_bytes:
            break
    said = f"With everything this page has {full / 1e6:.0f} MB of data, which is slow to open. Only this is kept: "
    data["notes"] = [said + "; ".join(notes) + ".", *data["notes"]]
    return data


def _size(data: Data) -> int:
    return len(json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode())


def _reduce_rates(data: Data) -> str | None:
    if all(len(link["times"]) <= SAMPLES for link in data["links"]):
        return None
    for link in data["links"]:
        kept = list(_highest(link["rates"]))
        link["times"] = [link["times"][i] for i in kept]
        link["rates"] = [link["rates"][i] for i in kept]
    return f"of a link the {SAMPLES} times with the highest rates of their neighbourhood"


def _reduce_memory(data: Data) -> str | None:
    found = False
    for memory in (trace[name] for trace in data["traces"] for name in ("memory", "host")):
        for row, held in enumerate(memory["held"]):
            if len(held) <= SAMPLES:
                continue
            found = True
            kept = list(_highest([sum(kinds) for kinds in held]))
            memory["times"][row] = [memory["times"][row][i] for i in kept]
            memory["held"][row] = [held[i] for i in kept]
    return f"of a device's memory {SAMPLES} samples, each the highest of its neighbourhood" if found else None


def _highest(values: list[float]) -> Iterator[int]:
    """Positions of the first value, and of the highest value of each of ``SAMPLES`` equal runs."""
    count = len(values)
    bounds = [count * i // SAMPLES for i in range(SAMPLES + 1)] if count > SAMPLES else range(count + 1)
    for start, end in pairwise(bounds):
        yield start if start == 0 else max(range(start, end), key=values.__getitem__)


def _without_messages(data: Data) -> str | None:
    kinds = {kind.value for kind in COMM_KINDS}
    if not any(kinds.intersection(trace["events"]["kind"]) for trace in data["traces"]):
        return None
    for trace in data["traces"]:
        _keep_events(trace, [kind not in kinds for kind in trace["events"]["kind"]])
    data["queues"] = [[name for name in queues if not is_message_queue(name)] for queues in data["queues"]]
    return "no messages between devices"


def _fewer_devices(data: Data, most_bytes: int) -> str:
    """Keep the actions of as many devices as fit, spread over all."""
    count = len(data["queues"])
    wanted = max(int(count * most_bytes / _size(data) * 0.9), 1)
    while True:
        kept = {round(i * (count - 1) / max(wanted - 1, 1)) for i in range(wanted)}
        smaller = json.loads(json.dumps(data))
        for trace in smaller["traces"]:
            _keep_events(trace, [device in kept for device in trace["events"]["device"]])
            for name in ("times", "held"):
                trace["memory"][name] = [
                    row if device in kept else row[:1] for device, row in enumerate(trace["memory"][name])
                ]
        if _size(smaller) <= most_bytes or wanted == 1:
            data.update(smaller)
            return f"the actions of {len(kept)} of {count} devices, evenly spread"
        wanted //= 2


def _keep_events(trace: Data, keep: list[bool]) -> None:
    trace["events"] = {
        name: [value for value, kept in zip(column, keep, strict=True) if kept]
        for name, column in trace["events"].items()
    }
