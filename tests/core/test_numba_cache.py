"""Compiled functions where numba has a folder for them, and where it has none."""

import numba
import pytest
from panpipe.core.numba_cache import njit


def refusing(monkeypatch, message):
    """numba without any folder to write."""
    real = numba.njit

    def without_folder(*functions, cache=False, **options):
        if cache:
            raise RuntimeError(message)
        return real(*functions, **options)

    monkeypatch.setattr(numba, "njit", without_folder)


def test_function_is_compiled_where_no_cache_can_be_written(monkeypatch):
    refusing(monkeypatch, "cannot cache function 'double': no locator available for file 'x.py'")
    doubled = njit(inline="always")(lambda x: 2 * x)
    assert doubled(21) == 42
    assert doubled.signatures


def test_other_failures_of_numba_are_its_own(monkeypatch):
    refusing(monkeypatch, "something else")
    with pytest.raises(RuntimeError, match="something else"):
        njit()(lambda x: x)
