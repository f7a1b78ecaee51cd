"""Clipping by the global norm, compared with torch's functions: the norm over stages and replicas, and its factor."""

import math

import panpipe
import pytest
import torch
from panpipe.runtimes.diagnose.parity import reference_step

from ...support.models import CASES
from ...support.programs import scaling
from ...support.training import SGD, gradients, parameters, pipeline_of, unequal

CONV, GPT, WEIGHTED = (CASES[n] for n in ("batchnorm with a skip", "tied gpt with dropout", "token-weighted"))


def plain(case, model, clip_norm):
    """One process with ``clip_grad_norm_``."""
    return scaling.Alone(case, model, SGD, clip_norm, enabled=False)


@pytest.mark.parametrize("plan", [{}, {"split": True}, {"schedule_name": "v-half", "chunks": 2}])
def test_clipping_has_the_bits_of_one_device_and_agrees_with_torch(plan):
    torch.set_num_threads(1)
    pipe, alone = pipeline_of(CONV, 8, 4, optimizer=SGD, clip_norm=0.5, plan_options=plan)
    whole, _ = pipeline_of(CONV, 8, 4, 1, optimizer=SGD, clip_norm=0.5)
    one, batch = plain(CONV, alone, 0.5), CONV.batch(8, torch.float32)
    for _ in range(3):
        pipe.step(batch)
        whole.step(batch)
        one.step(batch)
        assert pipe.metrics.grad_norm == whole.metrics.grad_norm
        assert pipe.metrics.grad_norm == pytest.approx(
            one.norm, rel=1e-6
        )  # kernels of eager's backward may round differently
        assert pipe.metrics.grad_norm > 0.5  # or nothing was clipped
    assert unequal(parameters(pipe._session.model), parameters(whole._session.model)) == []
    assert unequal(gradients(pipe._session.model), gradients(whole._session.model)) == []
    torch.testing.assert_close(parameters(pipe._session.model), parameters(alone), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients(pipe._session.model), gradients(alone), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", [GPT, WEIGHTED])
def test_tied_weight_counts_once_in_the_global_norm(case):
    pipe, alone = pipeline_of(case, 8, 4, 3, optimizer=SGD, clip_norm=0.1)
    one, batch = plain(case, alone, 0.1), case.batch(8, torch.float32)
    for _ in range(2):
        pipe.step(batch)
        one.step(batch)
        assert one.norm > 0.1
    assert pipe.metrics.grad_norm == pytest.approx(one.norm, rel=1e-6)
    torch.testing.assert_close(parameters(pipe._session.model), parameters(alone), rtol=1e-5, atol=1e-6)


def test_infinite_clip_norm_only_measures():
    pipe, alone = pipeline_of(CONV, 8, 4, clip_norm=math.inf)
    pipe.step(CONV.batch(8, torch.float32))
    reference_step(alone, CONV.step, CONV.batch(8, torch.float32), microbatches=4, seed=3)
    assert (
        pipe.metrics.grad_norm
        == torch.nn.utils.get_total_norm([p.grad for p in pipe._session.model.parameters()]).item()
    )
    torch.testing.assert_close(gradients(pipe._session.model), gradients(alone), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("norm", [0, -1.0, math.nan, "1", True])
def test_invalid_clip_norm_is_refused(norm):
    with pytest.raises(panpipe.RequestError, match=r"clip_norm is .*give a positive number") as refusal:
        pipeline_of(CONV, 8, 4, clip_norm=norm)
    assert "\n" not in str(refusal.value)
