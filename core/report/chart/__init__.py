"""Schedules and steps as pictures: SVGs, and a page around that of a schedule."""

from .comparison import comparison_svg
from .drawing import schedule_svg
from .page import schedule_html

__all__ = ["comparison_svg", "schedule_html", "schedule_svg"]
