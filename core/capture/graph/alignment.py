"""Alignment of two versions of a sequence, as a diff aligns two versions of a text."""

from collections.abc import Hashable, Sequence
from difflib import SequenceMatcher


def aligned(old: Sequence[Hashable], new: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Pairs of positions, in the old and in the new sequence, of equal elements; ascending in both."""
    matcher = SequenceMatcher(None, old, new, autojunk=False)
    return [(a + i, b + i) for a, b, size in matcher.get_matching_blocks() for i in range(size)]
