"""Gradients that are not finite where the loss is: what clipping measures is followed by what follows such a loss."""

import logging
import math

import panpipe
import pytest
import torch

from ...support.programs.infinite_gradient import ROOT, root_batch
from ...support.training import SGD, parameters, pipeline_of, unequal


def pipe_of(mode, **options):
    return pipeline_of(ROOT, 8, 4, 3, optimizer=SGD, on_nonfinite=mode, **options)[0]


@pytest.mark.parametrize("clip_norm", [1.0, math.inf])
@pytest.mark.parametrize("mode", ["skip", "raise"])
def test_update_with_a_norm_that_is_not_finite_is_not_made(mode, clip_norm, caplog):
    pipe, undisturbed = pipe_of(mode, clip_norm=clip_norm), pipe_of(mode, clip_norm=clip_norm)
    stage = next(s.index for s in pipe.plan.stages if "root.shift" in s.parameters)
    said = (
        r"^the loss of step 2 is finite and the global norm of its gradients is (inf|nan): the gradient of "
        rf"'root.shift' in stage {stage} is not finite; no parameter was updated$"
    )
    for number, zero in enumerate((False, True, False), 1):
        before = parameters(pipe._session.model)
        given = root_batch(8, torch.float32, zero)
        if zero and mode == "raise":
            with pytest.raises(panpipe.NonFiniteError, match=said) as found:
                pipe.step(given)
            assert (found.value.step, found.value.stage) == (2, stage)
        else:
            assert pipe.step(given).isfinite()
        assert pipe.metrics.skipped is zero
        assert (unequal(parameters(pipe._session.model), before) == []) is zero
        if not zero:
            undisturbed.step(given)
        assert pipe.metrics.steps == number
    assert pipe.metrics.updates == 2
    assert unequal(parameters(pipe._session.model), parameters(undisturbed._session.model)) == []
    reported = [r.getMessage() for r in caplog.records if r.name == "panpipe" and r.levelno == logging.WARNING]
    assert len(reported) == (mode == "skip")


def test_without_clipping_or_without_a_check_the_update_is_made():
    zero = root_batch(8, torch.float32, zero=True)
    for pipe in (pipe_of("skip"), pipe_of(None, clip_norm=1.0)):
        assert pipe.step(zero).isfinite()
        assert not pipe.metrics.skipped
        assert not all(p.isfinite().all() for p in pipe._session.model.parameters())
