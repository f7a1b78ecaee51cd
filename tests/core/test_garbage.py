"""Rare collections: thresholds while much is allocated, and what they are afterwards."""

import gc

import pytest
from panpipe.core.garbage import THRESHOLDS, rare_collections


@pytest.fixture(autouse=True)
def thresholds():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_thresholds_are_raised_inside_and_restored_after_a_failure():
    gc.set_threshold(700, 10, 10)
    with rare_collections():
        assert gc.get_threshold() == THRESHOLDS
    assert gc.get_threshold() == (700, 10, 10)
    with pytest.raises(KeyError), rare_collections():
        raise KeyError(gc.get_threshold())
    assert gc.get_threshold() == (700, 10, 10)


def test_disabled_or_less_frequent_collector_is_not_changed():
    for own in ((0, 10, 10), (1_000_000, 50, 500)):
        gc.set_threshold(*own)
        with rare_collections():
            assert gc.get_threshold() == own
