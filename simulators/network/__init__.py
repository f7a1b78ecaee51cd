"""Flows over links that they share."""
