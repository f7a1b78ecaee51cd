"""Pictures of schedules and steps: SVGs, and an HTML page with the picture of a schedule."""

from .comparison import comparison_svg
from .drawing import schedule_svg
from .page import schedule_html

__all__ = ["comparison_svg", "schedule_html", "schedule_svg"]
