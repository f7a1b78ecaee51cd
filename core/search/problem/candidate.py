"""A candidate of the search: cuts, placement, orders and recomputation together."""

from typing import NamedTuple

import numpy as np

from ...evaluate.coding import Integers


class Candidate(NamedTuple):
    """One choice of cuts, placement, orders and recomputation; moves change its arrays in place.

    Args:
        placement: device of every stage, (stages).
        cuts: number of operators before each stage, and of all, (stages + 1).
        recompute: whether each stage recomputes, (stages).
        orders, lengths: coded orders of every device, with capacity for all backwards to be split.
    """

    placement: Integers
    cuts: Integers
    recompute: "np.ndarray"
    orders: Integers
    lengths: Integers

    def copy(self) -> "Candidate":
        """A copy with its own arrays."""
        return Candidate(*(part.copy() for part in self))
