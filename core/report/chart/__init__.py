"""Schedules as pictures: an SVG, and a page around it."""

from .drawing import schedule_svg
from .page import schedule_html

__all__ = ["schedule_html", "schedule_svg"]
