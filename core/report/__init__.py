"""The report: one self-contained HTML page about a plan, its prediction and its measurement."""

from .facts import Check, Checked, ReportFacts
from .page import report_html, write_report

__all__ = ["Check", "Checked", "ReportFacts", "report_html", "write_report"]
