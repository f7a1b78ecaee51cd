"""The limit on waiting: an argument, a variable of the environment, or the default."""

import pytest
from panpipe.core.errors import RequestError
from panpipe.runtimes.watch.timeout import TIMEOUT_S, VARIABLE, timeout_of


def test_argument_comes_before_the_variable_and_that_before_the_default(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert timeout_of(None) == TIMEOUT_S == 300.0
    monkeypatch.setenv(VARIABLE, "12.5")
    assert timeout_of(None) == 12.5
    assert timeout_of(3) == 3.0


@pytest.mark.parametrize("given", [0, -1.0, float("inf"), float("nan"), True, "5"])
def test_limit_that_is_no_finite_number_above_0_is_refused(given):
    with pytest.raises(RequestError, match=r"timeout_s is .*: give a finite number of seconds above 0"):
        timeout_of(given)


@pytest.mark.parametrize("text", ["", "soon", "0", "inf", "nan"])
def test_variable_that_is_no_finite_number_above_0_is_refused(text, monkeypatch):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(RequestError, match=f"{VARIABLE} is '{text}'"):
        timeout_of(None)
