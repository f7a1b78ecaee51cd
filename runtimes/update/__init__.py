"""Optimizers of stages, their state, the reduction of gradients and the update of a step."""
