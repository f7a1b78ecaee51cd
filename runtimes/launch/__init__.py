"""Processes of a pipeline: how they start, meet, watch each other, and report failures."""
