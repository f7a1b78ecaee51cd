"""Saving while training continues: one at a time, with the state of the moment of the call, and errors later."""

import logging
import threading

import panpipe
import pytest
from panpipe.runtimes.checkpoint import checkpoints
from panpipe.runtimes.checkpoint.writing import Save

from ...support.programs.optimizing import everything, pipe_of, train, warm_up
from ...support.training import unequal

CONV = "batchnorm with a skip"


@pytest.fixture
def held(monkeypatch):
    """Saves in the background begin to write when this event is set."""
    allowed, run = threading.Event(), Save.run

    def wait(self, exchange):
        if threading.current_thread() is not threading.main_thread():
            assert allowed.wait(60)
        run(self, exchange)

    monkeypatch.setattr(checkpoints.Save, "run", wait)
    yield allowed
    allowed.set()


def test_a_checkpoint_has_the_state_of_the_call_while_training_continues(held, tmp_path):
    pipe = pipe_of(CONV, scheduler=warm_up)
    train(pipe, CONV, 1)
    wanted = {name: tensor.clone() for name, tensor in everything(pipe).items()}
    pipe.checkpoint(tmp_path / "step-1", wait=False)
    losses = train(pipe, CONV, 2)
    assert panpipe.latest_checkpoint(tmp_path) is None
    held.set()
    pipe.checkpoint(tmp_path / "step-3")  # waits for the one before
    assert panpipe.latest_checkpoint(tmp_path) == tmp_path / "step-3"
    pipe.resume(tmp_path / "step-1")
    assert unequal(everything(pipe), wanted) == []
    assert train(pipe, CONV, 2) == losses


@pytest.mark.parametrize("later", ["step", "checkpoint", "resume", "wait_for_checkpoint", "close"])
def test_an_error_of_a_save_is_logged_at_once_and_raised_by_the_next_call(held, tmp_path, later, caplog):
    pipe = pipe_of(CONV)
    pipe.checkpoint(tmp_path / "step-0")
    pipe.checkpoint(tmp_path / "sub" / "step-1", wait=False)
    (hidden,) = (tmp_path / "sub").iterdir()
    hidden.rmdir()  # a disk that is gone
    train(pipe, CONV, 1)
    held.set()
    pipe._session.checkpoints._in_flight._thread.join()
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "step-1' cannot be written" in caplog.text
    calls = {
        "step": lambda: train(pipe, CONV, 1),
        "checkpoint": lambda: pipe.checkpoint(tmp_path / "step-2"),
        "resume": lambda: pipe.resume(tmp_path / "step-0"),
        "wait_for_checkpoint": pipe._session.checkpoints.wait,
        "close": pipe.close,
    }
    with pytest.raises(panpipe.RequestError, match=r"\A[^\n]*step-1' cannot be written: No such file[^\n]*\Z"):
        calls[later]()
    assert not (tmp_path / "step-2").exists()
    assert pipe.metrics.steps == 1
    if later != "close":
        train(pipe, CONV, 1)  # raised once
        pipe.checkpoint(tmp_path / "step-2")
    pipe.close()


def test_a_with_block_that_fails_does_not_wait_for_the_save(held, tmp_path):
    def fails():
        with pipe_of(CONV) as pipe:
            pipe.checkpoint(tmp_path / "step-1", wait=False)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert panpipe.latest_checkpoint(tmp_path) is None
    held.set()
