"""Processes of a pipeline: their start, their meeting, and the agreements before they begin."""
