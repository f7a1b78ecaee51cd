"""The bounded cache: what goes first, and what is not evicted."""

import pytest
from panpipe.runtimes.batch.lru_cache import LruCache


def cache_of(*keys, limit=3):
    cache = LruCache(limit)
    for key in keys:
        cache.keep(key, key.upper())
    return cache


def test_least_recently_used_value_is_evicted():
    cache = cache_of("a", "b", "c")
    assert cache.use("a") == "A"
    assert cache.keep("d", "D")
    assert list(cache) == ["c", "a", "d"]
    assert cache.use("b") is None
    assert "b" not in cache


def test_value_below_the_limit_or_of_a_known_key_evicts_nothing():
    cache = cache_of("a", "b")
    assert not cache.keep("c", "C")
    assert not cache.keep("a", "again")
    assert cache.use("a") == "again"


def test_needed_keys_are_kept_above_the_limit_and_evicted_later():
    cache = cache_of("a", "b", "c")
    assert cache.keep("d", "D", needed={"a", "b"})
    assert list(cache) == ["a", "b", "d"]
    assert not cache.keep("e", "E", needed={"a", "b", "d"})
    assert list(cache) == ["a", "b", "d", "e"]
    assert cache.keep("f", "F")
    assert list(cache) == ["d", "e", "f"]


def test_value_that_was_just_added_stays_whatever_the_limit():
    cache = LruCache(0)
    assert not cache.keep("a", "A")
    assert cache.keep("b", "B")
    assert list(cache) == ["b"]


@pytest.mark.parametrize("key", ["a", "unknown"])
def test_values_are_dropped_and_cleared(key):
    cache = cache_of("a", "b")
    cache.drop(key)
    assert key not in cache
    cache.clear()
    assert list(cache) == []


def test_cache_may_change_while_its_keys_are_read():
    cache = cache_of("a", "b")
    for key in cache:
        cache.use(key)
        cache.drop(key)
    assert list(cache) == []
