"""Processes of a pipeline: their start, their connections, and the detection and report of failures."""
