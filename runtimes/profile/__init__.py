"""Measuring operators, stages, messages and links on the machine at hand."""
