"""Pictures of steps and clusters: SVGs."""

from .steps import comparison_svg, step_svg

__all__ = ["comparison_svg", "step_svg"]
