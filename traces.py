"""Traces of steps, simulated and measured: files, comparison, and the report page."""

from .core.report.data import Check, Checked, ReportFacts
from .core.report.page import write_report
from .core.trace.compare import compare
from .core.trace.perfetto import write_trace
from .core.trace.perfetto_reader import read_trace
from .core.trace.trace import Trace

__all__ = ["Check", "Checked", "ReportFacts", "Trace", "compare", "read_trace", "write_report", "write_trace"]
