"""The update between the last backward and the optimizer's step, with clipping, compared with torch's functions."""

import math

import pytest
import torch
from panpipe.runtimes.diagnose.parity import reference_step
from panpipe.runtimes.update.stage_state import StageState
from panpipe.runtimes.update.update import NormParameters, Update
from torch import nn

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


class Deciding(torch.optim.SGD):
    """Leaves a step out by itself, as fused optimizers do."""

    _step_supports_amp_scaling = True

    def step(self, closure=None):
        assert self.grad_scale is None
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.sub_(torch.where(self.found_inf > 0, 0.0, parameter.grad))


class Alone:
    """A transport with one device."""

    device, devices = 0, 2

    def all_reduce(self, tensor):
        return self

    def wait(self):
        pass


@pytest.mark.parametrize(("optimizer", "scale"), [(SGD, None), (Deciding, 8.0)])
def test_host_reads_no_tensor_between_the_last_backward_and_the_steps(optimizer, scale):
    """On tensors without values, whose reading fails."""
    meta = torch.device("meta")
    parameters = {name: nn.Parameter(torch.empty(4, 3, device=meta)) for name in "abc"}
    for name in "ab":
        parameters[name].grad = torch.empty(4, 3, device=meta)
    state = StageState(parameters, {}, optimizer, device=meta)
    norm_parameters = NormParameters(((0, "a", torch.float32), (0, "c", torch.float32), (1, "d", torch.float32)))
    pipe, _ = pipeline_of(CONV, 8, 4, clip_norm=1.0)
    update = Update(pipe.plan, {0: state}, norm_parameters, 1.0, meta)
    with torch.no_grad():
        update.begin(torch.empty((), device=meta), scale, None if scale is None else (torch.empty((), device=meta), 2))
        update.sync(Alone())
        update.step(state)
    assert update.norm.is_meta
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):  # or the test would see no reading
        update.norm.item()


@pytest.mark.filterwarnings("ignore:microbatches of a new shape")
@pytest.mark.parametrize("sizes", [(8, 8, 8), (8, 6, 3)])
@pytest.mark.parametrize("case", [CONV, WEIGHTED])
def test_accumulated_gradients_equal_those_of_one_joined_batch(case, sizes):
    pipe, alone = pipeline_of(case, 8, 4, optimizer=SGD, clip_norm=math.inf)
    one, first = plain(case, alone, math.inf), parameters(pipe._session.model)
    batches = [case.batch(rows, torch.float32) for rows in sizes]
    for index, batch in enumerate(batches):
        assert unequal(parameters(pipe._session.model), first) == []
        pipe.step(batch, update=index == len(sizes) - 1)
    weights = sizes if case is CONV else [(batch["y"] > 8).sum().item() for batch in batches]
    one.step(*batches, weights=weights)
    torch.testing.assert_close(gradients(pipe._session.model), gradients(alone), rtol=1e-4, atol=1e-6)
    assert (pipe.metrics.steps, pipe.metrics.updates) == (3, 1)
    assert unequal(parameters(pipe._session.model), first) != []
    for each in (pipe, one):
        each.step(batches[0])  # begins anew
    torch.testing.assert_close(gradients(pipe._session.model), gradients(alone), rtol=1e-4, atol=1e-6)
