"""The report page: template, data and scripts in one self-contained HTML file.

Python computes the data, and the scripts draw it. The scripts are concatenated in the order below and share one scope.
"""

import json
from html import escape
from pathlib import Path
from string import Template

from ..plan.plan import Plan
from ..trace.trace import Trace
from .data import report_data
from .facts import ReportFacts
from .html_document import html_document, read_template

SCRIPTS = ("format.js", "view.js", "gantt.js", "memory.js", "links.js", "idle.js", "curves.js", "tables.js", "page.js")


def write_report(
    path: str | Path,
    *,
    plan: Plan | None,
    predicted: Trace,
    measured: Trace | None = None,
    facts: ReportFacts | None = None,
) -> None:
    """Write the report to one HTML file. The same input gives the same bytes.

    Args:
        path: of the file.
        plan: the plan of both traces; None omits its part of the page.
        predicted: the simulated step.
        measured: a measured step; without it the page shows only the prediction.
        facts: further contents.
    """
    text = report_html(plan=plan, predicted=predicted, measured=measured, facts=facts)
    Path(path).write_text(text, encoding="utf-8")


def report_html(
    *, plan: Plan | None, predicted: Trace, measured: Trace | None = None, facts: ReportFacts | None = None
) -> str:
    """The report's text; arguments as in ``write_report``."""
    data = report_data(plan, predicted, measured, facts or ReportFacts())
    title = str(data["title"])
    body = Template(_template("page.html")).substitute(
        title=escape(title), data=_embedded(data), script="\n".join(_template(name) for name in SCRIPTS)
    )
    return html_document(title, _template("page.css"), body.rstrip("\n"), color_scheme="light dark")


def _embedded(data: dict[str, object]) -> str:
    # "</script>" inside a string must not end the element that holds the data.
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def _template(name: str) -> str:
    return read_template(__package__, name)
