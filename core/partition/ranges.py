"""What every contiguous range of a graph's order would cost as one stage.

Tables are square arrays indexed ``[end, start]`` (a range holds nodes ``start`` to ``end - 1``), so that a search over
the start of a stage reads one contiguous row. N nodes give (N+1)² entries: 32 MB a table at 2,000 nodes.
"""

from functools import cached_property

import numpy as np
import numpy.typing as npt
from attrs import frozen

from ..graph import OpGraph

Table = npt.NDArray[np.float64]


@frozen(slots=False)
class RangeTables:
    """The tables of one graph. Times in seconds and sizes in bytes, for one microbatch; each is made on first use."""

    graph: OpGraph

    @property
    def size(self) -> int:
        """Number of nodes."""
        return len(self.graph.nodes)

    @cached_property
    def compute_s(self) -> Table:
        """F + I + W."""
        return _sums([n.forward_s + n.backward_input_s + n.backward_weight_s for n in self.graph.nodes])

    @cached_property
    def state_bytes(self) -> Table:
        """Parameters, gradients and optimizer state."""
        return _sums([node.state_bytes for node in self.graph.nodes])

    @cached_property
    def saved_bytes(self) -> Table:
        """Held from F to the backward, for each microbatch in flight."""
        return _sums([node.saved_bytes for node in self.graph.nodes])

    @cached_property
    def workspace_bytes(self) -> Table:
        """The largest workspace of the range's nodes."""
        largest = np.zeros((self.size + 1, self.size + 1))
        for end, node in enumerate(self.graph.nodes, start=1):
            largest[end, :end] = np.maximum(largest[end - 1, :end], node.workspace_bytes)
        return largest

    @cached_property
    def received_bytes(self) -> Table:
        """Forward bytes that the range reads from before it: each tensor once, however many of its nodes read it.

        A tensor goes directly to each later stage that reads it, so the sum over the stages of a partition is all
        that the partition sends, skip edges included.
        """
        return self._received(gradients=False)

    @cached_property
    def returned_bytes(self) -> Table:
        """Gradient bytes that the range sends back for what it received."""
        return self._received(gradients=True)

    def _received(self, gradients: bool) -> Table:
        readers: dict[tuple[int, int], list[int]] = {}
        sizes: dict[tuple[int, int], int] = {}
        for edge in self.graph.edges:
            if gradients and not edge.gradient:
                continue
            tensor = self.graph.index[edge.src], edge.tensor
            readers.setdefault(tensor, []).append(self.graph.index[edge.dst])
            sizes[tensor] = max(sizes.get(tensor, 0), edge.bytes)
        # A range that starts behind one reader (or the producer) and at or before the next reads the tensor as soon as
        # it ends behind that next one: a rectangle of the table, added as the four corners of its difference.
        corners = np.zeros((self.size + 2, self.size + 2))
        for tensor, positions in readers.items():
            before = tensor[0]
            for reader in sorted(set(positions)):
                corners[reader + 1, before + 1] += sizes[tensor]
                corners[reader + 1, reader + 1] -= sizes[tensor]
                before = reader
        return np.ascontiguousarray(corners.cumsum(axis=0).cumsum(axis=1)[:-1, :-1])


def _sums(values: list[float]) -> Table:
    prefix = np.concatenate([[0.0], np.cumsum(np.array(values, dtype=np.float64))])
    return np.ascontiguousarray(prefix[:, None] - prefix[None, :])
