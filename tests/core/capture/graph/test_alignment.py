"""Two versions of a sequence, aligned."""

import itertools

from hypothesis import given
from hypothesis import strategies as st
from panpipe.core.capture.graph.nodes import aligned

SEQUENCES = st.lists(st.sampled_from("abcd"), max_size=12)


def test_alignment_skips_insertions_and_deletions():
    assert aligned("abcde", "axbde") == [(0, 0), (1, 2), (3, 3), (4, 4)]
    assert aligned("abc", "xyz") == []


@given(SEQUENCES, SEQUENCES)
def test_aligned_pairs_are_equal_and_ascending(old, new):
    pairs = aligned(old, new)
    assert all(old[a] == new[b] for a, b in pairs)
    assert all(a < c and b < d for (a, b), (c, d) in itertools.pairwise(pairs))


@given(SEQUENCES)
def test_equal_sequences_are_aligned_one_to_one(sequence):
    assert aligned(sequence, sequence) == [(i, i) for i in range(len(sequence))]
