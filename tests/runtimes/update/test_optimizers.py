"""Parameter groups and schedulers of stages, compared with one optimizer and scheduler in one process."""

import copy

import panpipe
import pytest
import torch
from panpipe.runtimes.diagnose.parity import reference_step
from torch.optim import lr_scheduler

from ...support.models import CASES
from ...support.programs.optimizing import F32, pipe_of, two_groups, warm_up
from ...support.training import parameters, unequal

GPT, CONV = "tied gpt with dropout", "batchnorm with a skip"


def alone(name, optimizer, scheduler=None, steps=4, freeze=()):
    """One process; its parameters and learning rates."""
    case = CASES[name]
    model = case.model(F32)
    for key in freeze:
        model.get_parameter(key).requires_grad_(False)
    made = optimizer([(n, p) for n, p in model.named_parameters() if p.requires_grad])
    schedule, rates = None if scheduler is None else scheduler(made), []
    for index in range(steps):
        reference_step(model, case.step, case.batch(8, F32), microbatches=4, seed=3, index=index)
        made.step()
        if schedule is not None:
            schedule.step()
        rates.append([group["lr"] for group in made.param_groups])
    return parameters(model), rates


def trained(name, optimizer, scheduler=None, steps=4, freeze=(), **options):
    """The same as a pipeline."""
    model = CASES[name].model(F32)
    for key in freeze:
        model.get_parameter(key).requires_grad_(False)
    pipe, rates = pipe_of(name, model=model, optimizer=optimizer, scheduler=scheduler, **options), []
    for _ in range(steps):
        pipe.step(CASES[name].batch(8, F32))
        rates.append(pipe.metrics.learning_rates)
    return parameters(pipe._session.model), rates


def check_as_in_one_process(found, optimizer, *others, **options):
    """Equal to the captured graph on one device to the last bit, and to eager PyTorch but for rounding.

    Which kernel of a matrix library eager's backward calls depends on strides and on the processor: the two may differ
    in the last bit.
    """
    one = trained(CONV, optimizer, *others, devices=1, **options)
    wanted = alone(CONV, optimizer, *others, **options)
    assert unequal(found[0], one[0]) == []
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-6)
    assert found[1] == wanted[1]


def by_depth(named):
    """A group for each learning rate, by name; most of them are empty in most stages."""
    named = list(named)
    rates = {"stem": 1e-3, "trunk": 2e-3, "norms": 4e-3, "head": 8e-3}
    groups = [{"params": [p for n, p in named if n.startswith(k)], "lr": lr} for k, lr in rates.items()]
    return torch.optim.SGD(groups, lr=1e-3, momentum=0.9)


@pytest.mark.parametrize("cut", [{}, {"devices": 3}, {"schedule_name": "v-half", "chunks": 2}])
@pytest.mark.parametrize("optimizer", [two_groups, by_depth])
def test_groups_by_name_are_those_of_one_process(optimizer, cut):
    check_as_in_one_process(trained(CONV, optimizer, **cut), optimizer)


def test_a_tied_weight_is_in_the_same_group_everywhere():
    def named_groups(named):
        named = list(named)
        head = [p for n, p in named if n == "embedding.weight"]
        return torch.optim.AdamW([{"params": head, "lr": 1e-1}, {"params": [p for _, p in named if p is not head]}])

    with pytest.raises(panpipe.RequestError, match="some parameters appear in more than one"):
        pipe_of(GPT, optimizer=named_groups)

    def right(named):
        named = list(named)
        tied = [p for n, p in named if n == "embedding.weight"]
        return torch.optim.SGD(
            [{"params": tied, "lr": 1e-1}, {"params": [p for n, p in named if n != "embedding.weight"], "lr": 1e-2}]
        )

    pipe = pipe_of(GPT, 3, optimizer=right)
    for _ in range(3):
        pipe.step(CASES[GPT].batch(8, F32))
    copies = [own["embedding.weight"] for own in pipe._session.stage_parameters.values() if "embedding.weight" in own]
    assert len(copies) == 2
    assert torch.equal(*copies)
    torch.testing.assert_close(parameters(pipe._session.model), alone(GPT, right, steps=3)[0], rtol=1e-5, atol=1e-6)


def test_frozen_parameters_are_in_no_group():
    freeze = ("stem.weight", "stem.bias", "trunk.0.weight")
    found = trained(CONV, two_groups, freeze=freeze)
    check_as_in_one_process(found, two_groups, freeze=freeze)
    before = CASES[CONV].model(F32)
    assert all(torch.equal(found[0][name], before.get_parameter(name)) for name in freeze)


@pytest.mark.parametrize("kind", [{"foreach": True}, {"fused": True}])
def test_foreach_kernels_give_the_same_update(kind):
    def made(named):
        return torch.optim.AdamW(named, lr=1e-2, **kind)

    check_as_in_one_process(trained(CONV, made), made)


# Schedulers


@pytest.mark.parametrize("devices", [2, 3])
def test_scheduler_is_stepped_once_per_update_in_every_stage(devices):
    found = trained(CONV, two_groups, warm_up, 6, devices=devices)
    assert len({tuple(rates) for rates in found[1]}) > 4
    check_as_in_one_process(found, two_groups, warm_up, 6)


def test_user_schedulers_over_pipe_optimizers():
    pipe = pipe_of(CONV, 3)
    plateaus = [lr_scheduler.ReduceLROnPlateau(each, factor=0.5, patience=0) for each in pipe.optimizers.values()]
    for metric in (1.0, 2.0, 0.5, 3.0):
        for plateau in plateaus:
            plateau.step(metric)
    assert pipe.metrics.learning_rates == [1e-2 / 4, 5e-3 / 4]
    assert {tuple(g["lr"] for g in each.param_groups) for each in pipe.optimizers.values()} == {(2.5e-3, 1.25e-3)}


# What is refused


class Joint(torch.optim.Optimizer):
    """Takes a step of a length that all gradients together have, as optimizers that estimate their own rate do."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for parameter in held:
            parameter.add_(parameter.grad / norm, alpha=-0.1)


class Separate(torch.optim.SGD):
    """Not torch's, but it changes each parameter for itself."""


def of_the_model(model):
    return lambda named: torch.optim.SGD(model.parameters(), lr=0.1)


def pairs_in_groups(named):
    named = list(named)
    return torch.optim.SGD([{"params": [(n, p) for n, p in named if n.startswith(k)]} for k in ("stem", "head")], lr=1)


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (Joint, "Joint changes '.*' differently with the parameters of all stages than"),
        (torch.optim.LBFGS, r"LBFGS computes the loss again within its step\(closure\)"),
        (lambda named: torch.optim.SGD([dict(named)["head.weight"]]), "fails for the stage of '.*': KeyError: 'head.w"),
        (lambda named: torch.optim.SGD([p for n, p in named if n == "stem.bias"], lr=1), "return None if it takes"),
        (lambda named: torch.optim.SGD(named, lr=1 / len(named)), r"gives '.*' other options .*\(lr "),
        (pairs_in_groups, "groups of parameters, not of pairs"),
        (lambda named: 3, "returns int for the stage of '.*': return a torch.optim.Optimizer"),
        (of_the_model(CASES[CONV].model(F32)), r"takes a parameter of shape \(4, 3, 3, 3\) that the stage of"),
    ],
)
def test_unsupported_optimizers_are_refused(optimizer, said):
    with pytest.raises(panpipe.RequestError, match=rf"\A[^\n]*{said}[^\n]*\Z"):
        pipe_of(CONV, 3, optimizer=optimizer)


def other_schedulers():
    first = []

    def same(optimizer):
        first.append(lr_scheduler.StepLR(optimizer, 1))
        return first[0]

    return same


@pytest.mark.parametrize(
    ("scheduler", "said"),
    [
        (lr_scheduler.ReduceLROnPlateau, "ReduceLROnPlateau is stepped by a metric.*pipe.optimizers"),
        (lambda o: o, "returns AdamW: return a torch.optim.lr_scheduler.LRScheduler"),
        (lambda o: lr_scheduler.LambdaLR(o, [lambda _: 1.0]), "fails for an optimizer of 2 parameter groups: ValueErr"),
        (other_schedulers(), "a scheduler of another optimizer"),
        (3, "scheduler is 3: give a function of an optimizer"),
    ],
)
def test_unsupported_schedulers_are_refused(scheduler, said):
    with pytest.raises(panpipe.RequestError, match=rf"\A[^\n]*{said}[^\n]*\Z"):
        pipe_of(CONV, scheduler=scheduler)


def test_scheduler_without_an_optimizer_is_refused():
    with pytest.raises(panpipe.RequestError, match=r"Update\(scheduler=\) is given without optimizer="):
        pipe_of(CONV, optimizer=None, scheduler=warm_up)


def test_optimizer_factory_gets_the_real_parameters_once_per_stage():
    """It is also called with random tensors, which are not in the model."""
    seen = []

    def noting(named):
        named = list(named)
        seen.append(named)
        return Separate([p for _, p in named], lr=0.1)

    model = CASES[CONV].model(F32)
    pipe = pipe_of(CONV, 2, model=copy.deepcopy(model), optimizer=noting)
    pipe.step(CASES[CONV].batch(8, F32))
    real = {id(p) for p in pipe._session.model.parameters()}
    assert sum(all(id(p) in real for _, p in named) for named in seen) == 2
