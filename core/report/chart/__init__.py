"""Pictures of schedules and steps: SVGs."""

from .comparison import comparison_svg, step_svg
from .drawing import schedule_svg

__all__ = ["comparison_svg", "schedule_svg", "step_svg"]
