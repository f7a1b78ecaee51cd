"""Suggestions: the preferred one of several plans, and changes with which a plan fits."""
