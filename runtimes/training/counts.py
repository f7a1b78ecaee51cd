"""Counters of the steps, updates and visits of parameters of a pipeline."""

from attrs import define


@define(eq=False)
class Counts:
    """Counters of a pipeline, which random numbers depend on.

    Args:
        steps: batches so far.
        updates: optimizer steps so far; skipped ones do not count.
        visits: calls of `Pipeline.on_parameters` since the last step.
    """

    steps: int = 0
    updates: int = 0
    visits: int = 0
