"""Capture: a training step becomes an operator graph, and a part of it the programs of a stage."""

from .values.file_names import accept_any_file_name

accept_any_file_name()
