"""Optimizers of stages, their state, gradient sums and the update of a step."""
