"""The report page: template, data and scripts in one self-contained HTML file.

Python computes the data, and the scripts draw it. The scripts of ``TOOLS`` are a page's own scope; those of ``DRAWING``
together are the body of one function, ``drawReport(DATA, ROOT, view)``, so that a page can have several reports.
"""

import json
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from ..files.write import write_text
from ..plan.plan import Plan
from ..trace.trace import Trace
from .data import report_data
from .data_reduction import reduced_data
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
