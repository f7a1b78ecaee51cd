"""When the loss of a step is checked: before it returns, or by the next call where the host runs ahead."""

import math
import warnings

import panpipe
import pytest
import torch
from panpipe.backends import streams

from ...support.backends.recorded_streams import RecordedStreams
from ...support.programs.poison import POISONED, poisoned_batch
from ...support.training import SGD, pipeline_of


@pytest.fixture
def ahead(monkeypatch):
    """A CPU with streams, whose host runs ahead."""
    recorded = RecordedStreams()
    monkeypatch.setitem(streams._KINDS, "cpu", recorded)
    with recorded.using(recorded.current(torch.device("cpu"))):
        yield recorded


def pipe_and_batches(mode, **options):
    pipe, _ = pipeline_of(POISONED, 8, 4, 2, optimizer=SGD, on_nonfinite=mode, **options)
    return pipe, poisoned_batch(8, torch.float32, None), poisoned_batch(8, torch.float32, 1, 5, math.nan)


def warned(call):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in said if "is nan" in str(one.message)]


@pytest.mark.parametrize("then", ["step", "evaluate", "save", "checkpoint", "state_dict", "close"])
def test_loss_that_is_not_finite_is_warned_of_by_the_next_call(then, ahead, tmp_path):
    pipe, good, bad = pipe_and_batches("warn")
    calls = {
        "step": lambda: pipe.step(good), "evaluate": lambda: pipe.evaluate(good), "close": pipe.close,
        "save": lambda: pipe.save(tmp_path / "saved"), "checkpoint": lambda: pipe.checkpoint(tmp_path / "kept"),
        "state_dict": pipe.state_dict,
    }  # fmt: skip
    assert warned(lambda: pipe.step(good)) == []
    assert warned(lambda: pipe.step(bad)) == []
    (said,) = warned(calls[then])
    assert "the loss of step 2 is nan" in said
    assert "batch['poison'] is not finite in this microbatch" in said
    assert said.endswith("the update was made with it; further ones in a row are not reported")


def test_step_that_is_replaced_by_a_checkpoint_is_not_checked(ahead):
    pipe, good, bad = pipe_and_batches("warn")
    pipe.step(good)
    state = pipe.state_dict()
    pipe.step(bad)
    assert warned(lambda: pipe.load_state_dict(state)) == []
    assert warned(lambda: pipe.step(good)) == []
    assert pipe.steps == 2


def test_loss_on_which_an_update_depends_is_checked_before_the_step_returns(ahead):
    pipe, good, bad = pipe_and_batches("raise")
    pipe.step(good)
    with pytest.raises(panpipe.NonFiniteError, match=r"the loss of step 2 is nan.*; no parameter was updated"):
        pipe.step(bad)
    assert warned(lambda: pipe.step(good)) == []


def test_loss_of_a_batch_without_an_update_is_checked_before_the_step_returns(ahead):
    pipe, good, bad = pipe_and_batches("warn")
    (said,) = warned(lambda: pipe.step(bad, update=False))
    assert "its gradients wait for their update" in said
    assert pipe.step(good).isfinite()
