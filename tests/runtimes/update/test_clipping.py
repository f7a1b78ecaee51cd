"""Clipping by the global norm, compared with torch's functions: the norm over stages and replicas, and its factor."""

import math
from types import SimpleNamespace

import panpipe
import pytest
import torch
from panpipe.runtimes.diagnose.parity import reference_step
from panpipe.runtimes.update.update import NormParameters, clipping_factor
from torch import nn

from ...support.models import CASES
from ...support.programs import scaling
from ...support.training import SGD, gradients, parameters, pipeline_of, unequal

CONV, GPT, WEIGHTED = (CASES[n] for n in ("batchnorm with a skip", "tied gpt with dropout", "token-weighted"))
CPU = torch.device("cpu")
F32 = torch.float32


def plain(case, model, clip_norm):
    """One process with ``clip_grad_norm_``."""
    return scaling.Alone(case, model, SGD, clip_norm, enabled=False)


def state(copies=1, split=(), sharing=None, **gradients):
    """A stage with parameters that have these gradients, or None."""
    updated = {}
    for name, gradient in gradients.items():
        updated[name] = nn.Parameter(torch.zeros(2))
        updated[name].grad = None if gradient is None else torch.tensor(gradient)
    return SimpleNamespace(updated=updated, sharing=sharing, split=split, copies=lambda name, replicas: copies)


def test_tied_and_frozen_parameters_are_in_the_norm_once_and_not_at_all():
    stages = [SimpleNamespace(index=0, parameters=("a", "tied")), SimpleNamespace(index=1, parameters=("tied", "b"))]
    model = {name: nn.Parameter(torch.zeros(1)) for name in ("tied", "b", "frozen", "a")}
    model["frozen"].requires_grad_(False)
    found = NormParameters.of(SimpleNamespace(stages=stages), model)
    assert found.parameters == ((0, "tied", F32), (1, "b", F32), (0, "a", F32))  # in the model's order


def test_norms_of_other_stages_are_zeros_and_a_missing_gradient_does_not_count():
    names = NormParameters(((0, "a", F32), (1, "b", F32), (0, "none", F32)))
    here = names.norms({0: state(a=[3.0, 4.0], none=None)}, CPU)
    there = names.norms({1: state(b=[0.0, 12.0])}, CPU)
    assert [norm.item() for norm in there[:1]] == [0.0]
    table = torch.stack([norm.double() for norm in here]) + torch.stack([norm.double() for norm in there])
    assert table.tolist() == [5.0, 12.0, -1.0]
    assert names.global_norm(table).item() == 13.0
    assert names.global_norm(table).dtype == F32


def test_norm_has_the_dtype_that_torch_gives_it():
    names = NormParameters(((0, "a", torch.float16), (0, "b", torch.complex128)))
    assert names.global_norm(torch.tensor([3.0, 4.0], dtype=torch.float64)).dtype == torch.float64


class Twice:
    """A transport to one replica that has the same values."""

    devices = 2

    def all_reduce(self, table):
        table.mul_(2)
        return SimpleNamespace(wait=lambda: None)


def test_norms_of_slices_and_of_copies_are_added_over_replicas():
    names = NormParameters(((0, "slice", F32), (1, "whole", F32), (2, "part", F32)))
    states = {0: state(slice=[3.0, 4.0], sharing=object()), 1: state(whole=[1.0, 0.0])}
    states[2] = state(copies=2, split=("part",), part=[0.0, 6.0])
    norms, found = names.over_parts(names.norms(states, CPU), torch.tensor(1.0), states, Twice())
    # 25 of each of two slices; 36 of each of two parts, of which there are two copies
    assert [norm.item() for norm in norms] == pytest.approx([50**0.5, 1.0, 6.0])
    assert found.item() == 2.0


def test_slices_without_a_gradient_on_any_replica_stay_missing():
    names = NormParameters(((0, "slice", F32),))
    states = {0: state(slice=None, sharing=object())}
    norms, _ = names.over_parts(names.norms(states, CPU), torch.tensor(0.0), states, Twice())
    assert [norm.item() for norm in norms] == [-1.0]


@pytest.mark.parametrize(("norm", "most", "factor"), [(2.0, 1.0, 1 / (2 + 1e-6)), (0.5, 1.0, 1.0), (0.0, 1.0, 1.0)])
def test_factor_limits_the_norm_and_never_enlarges_it(norm, most, factor):
    assert clipping_factor(torch.tensor(norm, dtype=torch.float64), most).item() == factor


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
