"""The update between the last backward and the optimizer's step, compared with torch's functions."""

import math

import pytest
import torch
from panpipe.backends.memcpy import MemcpyBackend
from panpipe.core.actions import COMM_KINDS
from panpipe.core.policies.end_of_step import sync_bytes
from panpipe.runtimes.update.stage_state import StageState
from panpipe.runtimes.update.update import NormParameters, Update
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...support.models import CASES
from ...support.programs import scaling
from ...support.training import SGD, gradients, parameters, pipeline_of, unequal

CONV, GPT, WEIGHTED = (CASES[n] for n in ("batchnorm with a skip", "tied gpt with dropout", "token-weighted"))


def plain(case, model, clip_norm):
    """One process with ``clip_grad_norm_``."""
    return scaling.Alone(case, model, SGD, clip_norm, enabled=False)


@pytest.mark.parametrize("case", [CONV, GPT])
def test_sync_table_has_the_predicted_bytes(case, monkeypatch):
    summed, all_reduce = {torch.float64: [], torch.int64: []}, MemcpyBackend.all_reduce

    def watched(backend, tensor):
        summed[tensor.dtype].append(tensor.nbytes)  # the sync table, and the bits of the losses
        return all_reduce(backend, tensor)

    pipe, _ = pipeline_of(case, 8, 4, optimizer=SGD, clip_norm=0.1)
    pipe.step(case.batch(8, torch.float32))
    monkeypatch.setattr(MemcpyBackend, "all_reduce", watched)
    pipe.step(case.batch(8, torch.float32))
    assert summed == {torch.float64: [sync_bytes(pipe.plan)] * 2, torch.int64: [8 * 4] * 2}
    assert summed[torch.float64][0] == 8 * (2 + len(list(pipe._session.model.parameters())))


def test_every_device_with_a_stage_has_a_sync_action():
    pipe, _ = pipeline_of(CONV, 8, 4, 3, clip_norm=1.0)
    assert pipe.plan.sync
    _, trace = pipe.trace_step(CONV.batch(8, torch.float32))
    # A message starts when both of its ends are posted, which may be after a SYNC that was issued later.
    done = [e for e in trace.events if e.action.kind not in COMM_KINDS]
    ends = {d: [str(e.action) for e in done if e.device == d][-2:] for d in range(3)}
    assert ends == {d: [f"{d}SYNC", f"{d}STEP"] for d in range(3)}


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


def test_norm_of_gradients_is_nan_if_all_weights_of_the_losses_are_the_constant_zero():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.zeros(2)
    norm_parameters = NormParameters(((0, "a", torch.float32),))
    update = Update(None, {0: StageState({"a": parameter}, {}, SGD)}, norm_parameters, 1.0, torch.device("cpu"))
    update.begin(0.0, None)
    update.sync(Alone())
    assert update.norm.isnan()


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


class Writes(TorchDispatchMode):
    """Counts the operators that write each of some tensors."""

    def __init__(self, tensors):
        super().__init__()
        self.counts = dict.fromkeys((tensor.data_ptr() for tensor in tensors), 0)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for argument, value in zip(function._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in value if isinstance(value, list) else [value]:
                    if tensor.data_ptr() in self.counts:
                        self.counts[tensor.data_ptr()] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("divisor", [1.0, 3.0, torch.tensor(3.0)])
@pytest.mark.parametrize(("clip_norm", "scale"), [(0.5, 1024.0), (None, 1024.0), (0.5, None), (None, None)])
def test_gradients_are_written_once_in_an_update(divisor, clip_norm, scale):
    """Averaged, unscaled and clipped as by torch's functions one after another."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    own = dict(model.named_parameters())
    state = StageState(own, {}, lambda groups: torch.optim.SGD(groups, lr=0.0))
    for parameter in own.values():
        parameter.grad = torch.randn_like(parameter) * (scale or 1.0)
    wanted = [p.grad / float(divisor) / (scale or 1.0) for p in own.values()]
    norm = torch.nn.utils.get_total_norm(wanted)
    wanted = [g * min(1.0, (clip_norm or math.inf) / (norm.item() + 1e-6)) for g in wanted]
    names = NormParameters(tuple((0, name, p.dtype) for name, p in own.items()))
    update = Update(None, {0: state}, names, clip_norm, torch.device("cpu"))
    with torch.no_grad(), Writes([p.grad for p in own.values()]) as writes:
        update.begin(divisor, scale)
        update.sync(AllAlone())
        update.step(state)
    once = clip_norm is not None or scale is not None or not (isinstance(divisor, float) and divisor == 1)
    assert set(writes.counts.values()) == {int(once)}
    torch.testing.assert_close([p.grad for p in own.values()], wanted)
    if clip_norm is not None:
        torch.testing.assert_close(update.norm, norm)
    assert not update.overflow


@pytest.mark.parametrize("clip_norm", [0.5, None])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_non_finite_gradient_is_an_overflow(clip_norm, bad):
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([1.0, bad, 1.0])
    state = StageState({"p": parameter}, {}, lambda groups: torch.optim.SGD(groups, lr=1.0))
    update = Update(None, {0: state}, NormParameters(((0, "p", torch.float32),)), clip_norm, torch.device("cpu"))
    with torch.no_grad():
        update.begin(1.0, 8.0)
        update.sync(AllAlone())
        update.step(state)
    assert update.overflow
    assert torch.equal(parameter.detach(), torch.zeros(3))


class AllAlone:
    """A transport of one device."""

    devices = 1

    def all_reduce(self, tensor):
        return self

    def wait(self):
        pass
