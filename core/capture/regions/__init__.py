"""Regions: parts of a step that stay Python, which are calls of modules or the tail of the step."""
