"""The share of a device's matrix rate that a product or an attention reaches because of its shape.

A GPU computes a result in tiles, one thread block each, and runs as many thread blocks at once as it has
multiprocessors. Three things cost time that no FLOP formula counts (NVIDIA, Matrix Multiplication Background User's
Guide, sections 2 and 3):

* *tile quantisation*: a partial tile takes the time of a whole one;
* *wave quantisation*: the last wave of tiles takes the time of a full one;
* the start and end of a tile: it loads its first operands before it multiplies, and writes its result afterwards.

The share is relative to a large product: it multiplies the efficiency that the catalogue has for the device.
"""

from attrs import frozen

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.85), (64, 64, 0.7))
"""Rows, columns and relative rate of the tiles for 16-bit numbers. The sizes are those of NVIDIA's guide, which shows
that a smaller tile is slower, because it reads more bytes for each FLOP; the relative rates are assumed."""
HALF = 2
"""Bytes of the numbers for which `TILES` are given. Tiles of larger numbers have the same number of bytes."""
TILE_START = 64
"""Steps along the inner dimension in whose time a tile starts and ends: one step of the main loop, which is 64 long for
16-bit numbers (CUTLASS, default kernels for sm80 and sm90)."""
ATTENTION_ROWS = 128
"""Rows of queries, and of keys, in a thread block of attention (FlashAttention-2, arXiv 2307.08691, section 3.3)."""


@frozen
class Product:
    """A matrix product.

    Args:
        batch: independent products of this shape.
        rows, columns: size of the result.
        inner: terms of each of its sums.
        bytes: size of a number.
    """

    batch: int
    rows: int
    columns: int
    inner: int
    bytes: int = HALF

    def share(self, multiprocessors: int) -> float:
        """The share of its large-product rate on a device with this many multiprocessors, at most 1."""
        if not (self.batch and self.rows and self.columns and self.inner):
            return 1.0
        shrunk = max(self.bytes // HALF, 1)
        start = TILE_START / shrunk
        ideal = self.batch * self.rows * self.columns * self.inner
        found = 0.0
        for rows, wide, rate in TILES:
            columns = wide // shrunk
            tiles = self.batch * -(-self.rows // rows) * -(-self.columns // columns)
            waves = -(-tiles // multiprocessors)
            done = waves * multiprocessors * rows * columns * (self.inner + start)
            found = max(found, rate * ideal / done)
        return found


@frozen
class Scores:
    """The scores of an attention kernel, over batch and heads.

    Args:
        batch: samples times heads.
        rows, columns: queries and keys of each.
        causal: whether half of them are masked.
        backward: whether thread blocks are over keys instead of queries.
        key_bytes: size of keys and values.
    """

    batch: int
    rows: int
    columns: int
    causal: bool
    backward: bool
    key_bytes: int = 0

    def share(self, multiprocessors: int) -> float:
        """The share of the rate for long sequences, at most 1: blocks on the diagonal are computed whole."""
        if not (self.batch and self.rows and self.columns):
            return 1.0
        side = ATTENTION_ROWS
        rows, columns = -(-self.rows // side), -(-self.columns // side)
        blocks = self.batch * (columns if self.backward else rows)
        # A causal kernel starts with the longest blocks, so the last wave is short: only a lack of blocks costs time.
        waves = 1 if self.causal else -(-blocks // multiprocessors)
        occupied = min(1.0, blocks / (waves * multiprocessors))
        whole = self.rows * self.columns / (rows * columns * side * side)
        if self.causal and self.rows == self.columns:
            whole = (self.rows * (self.rows + 1) / 2) / (rows * (rows + 1) / 2 * side * side)
        return occupied * whole


Shape = Product | Scores
