"""torch's log level while ranks use a job's store."""

import pytest
from panpipe.runtimes.watch.torch_log import TorchLog


@pytest.fixture
def level(monkeypatch):
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    log = TorchLog()
    assert log._level is not None  # torch 2.11 to 2.13 have the variable
    before = log._level.value
    log._level.value = 1
    yield log
    log._level.value = before


def test_warnings_are_off_in_the_context_and_in_one_that_overlaps_it(level):
    with level.without_warnings():
        with level.without_warnings():
            assert level._level.value == 2
        assert level._level.value == 2
    assert level._level.value == 1


def test_warnings_stay_off_after_the_store_has_ended(level):
    level.end_warnings()
    with level.without_warnings():
        pass
    assert level._level.value == 2


def test_level_of_the_user_is_not_changed(monkeypatch):
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    with (log := TorchLog()).without_warnings():
        assert log._level is None
