"""The explorer's page: the form, the frontier, and one or two reports; all in one document that loads nothing."""

from string import Template
from typing import Any

from attrs import asdict

from ..answers.bundled_models import BUNDLED
from ..core.analytic.optimizers import OPTIMIZERS
from ..core.cluster.catalog import catalogue
from ..core.cluster.device_type import NUMBER_TYPES
from ..core.report.page import drawing_script, embedded, html_document, read_template, sections, style
from ..core.schedules.registry import families
from .question import KINDS, MOST_CHUNKS, MOST_DEVICES, MOST_MICROBATCHES, Question, plain_question
from .results import Results

SCRIPTS = ("ask.js", "address.js", "form.js", "frontier.js", "side.js", "explore.js")
LARGEST = (64, 256)
"""Devices and microbatches at the right ends of their sliders; the fields next to them accept more."""


def explorer_html(
    start: Question, results: Results, factory: str | None, token: str = "", grid: dict[str, Any] | None = None
) -> str:
    """The page.

    Args:
        grid: schedules and numbers for which a page without a server has files.
    """
    body = Template(_template("explore.html")).substitute(
        sections=sections(),
        data=embedded({**choices(start, results, factory), "token": token, "grid": grid}),
        script="\n".join((drawing_script(), *(_template(name) for name in SCRIPTS))),
    )
    css = style() + _template("explore.css")
    return html_document("Explorer", css, body.rstrip("\n"), color_scheme="light dark", connects=True)


def choices(start: Question, results: Results, factory: str | None) -> dict[str, Any]:
    """What the form offers."""
    known = catalogue()
    return {
        "start": plain_question(start),
        "defaults": {name: {"kind": name, **asdict(kind())} for name, kind in KINDS.items()},
        "results": results.titles,
        "graph": None if results.graph is None else str(results.graph),
        "factory": factory,
        "schedules": [
            {"name": family.name, "summary": family.summary, "offloads": family.offloads}
            for family in families().values()
            if family.name != "building-block"
        ],
        "models": list(BUNDLED),
        "clusters": [*known.clusters, *(f"8x{device}" for device in known.devices)],
        "dtypes": list(NUMBER_TYPES),
        "optimizers": list(OPTIMIZERS),
        "most": {"devices": MOST_DEVICES, "microbatches": MOST_MICROBATCHES, "chunks": MOST_CHUNKS},
        "largest": {"devices": LARGEST[0], "microbatches": LARGEST[1]},
    }


def _template(name: str) -> str:
    return read_template(__package__, name)
