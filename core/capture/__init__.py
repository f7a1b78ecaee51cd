"""Capture: a training step becomes an operator graph, and a part of it the programs of a stage."""
