"""Averages of the weights, and visits to parameters, in one process; over ranks they are in `test_ranks`."""

import panpipe
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ...laws.grouped import grouped
from ...support.cuts import captured, even_plan
from ...support.models import Case


def step(model, batch):
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def model():
    torch.manual_seed(0)
    layers = (nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    return nn.Sequential(*layers).double()


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(8, n, generator=generator, dtype=torch.float64) for name, n in (("x", 8), ("y", 4))}


@pytest.fixture(scope="module")
def plan():
    return even(2, 2)


def even(devices, microbatches):
    case = Case(lambda dtype: model(), step, lambda rows, dtype: batch())
    return even_plan(captured(case, torch.float64, 8, microbatches), devices, microbatches, "gpipe")


def again(plan, **options):
    optimizer = lambda p: torch.optim.SGD(p, 0.1)  # noqa: E731
    return panpipe.pipeline(
        model(), step, batch(), **grouped(optimizer=optimizer, plan=plan, progress=False, **options)
    )


def everything(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def test_average_has_the_bits_of_lerp_after_every_update(plan):
    pipe = again(plan)
    ema = panpipe.weights.ema(pipe, 0.9, buffers=True)
    own = {name: tensor.detach().clone() for name, tensor in everything(pipe._session.model).items()}
    for number in range(3):
        pipe.step(batch(number), update=False)
        pipe.step(batch(number + 10))
        for name, tensor in everything(pipe._session.model).items():
            own[name] = own[name].lerp(tensor.detach(), 1 - 0.9) if tensor.is_floating_point() else tensor.clone()
    assert ema.updates == 3
    assert all(torch.equal(own[name], ema.tensors[name]) for name in own)


def test_average_created_after_the_first_update_equals_torchs_averaged_model(plan):
    pipe = again(plan)
    averaged = AveragedModel(pipe._session.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    pipe.step(batch())
    ema = panpipe.weights.ema(pipe, 0.9)
    averaged.update_parameters(pipe._session.model)
    for number in range(3):
        pipe.step(batch(number))
        averaged.update_parameters(pipe._session.model)
    for name, parameter in averaged.module.named_parameters():
        assert torch.equal(parameter, ema.tensors[name]), name


def test_user_function_computes_the_average(plan):
    pipe = again(plan)
    mean = panpipe.weights.ema(
        pipe, function=lambda average, parameter, updates: average + (parameter - average) / (updates + 1)
    )
    seen = []
    for number in range(3):
        pipe.step(batch(number))
        seen.append(pipe._session.model[0].weight.detach().clone())
    assert torch.allclose(mean.tensors["0.weight"], torch.stack(seen).mean(0), rtol=1e-12)


def test_skipped_update_does_not_change_the_average(plan):
    pipe = again(plan, scaler=torch.amp.GradScaler("cpu"))
    ema = panpipe.weights.ema(pipe, 0.5)
    pipe.step({name: tensor * torch.inf for name, tensor in batch().items()})
    assert pipe.metrics.skipped
    assert ema.updates == 0
    assert torch.equal(ema.tensors["0.weight"], pipe._session.model[0].weight)


def test_training_continues_unchanged_after_evaluation_with_an_average(plan, tmp_path):
    pipe, other = again(plan), again(plan)
    ema = panpipe.weights.ema(pipe, 0.9)
    for each in (pipe, other):
        each.step(batch())
    before = pipe.evaluate(batch())
    with ema.applied():
        assert not torch.equal(before, pipe.evaluate(batch()))
        for asked, what in (
            (lambda: pipe.step(batch()), "train"),
            (lambda: pipe.checkpoint(tmp_path), "write a checkpoint"),
            (ema.applied().__enter__, "apply an average"),
        ):
            with pytest.raises(panpipe.RequestError, match=rf"to {what}, end the block `with ema.applied\(\)`"):
                asked()
    assert torch.equal(before, pipe.evaluate(batch()))
    assert torch.equal(pipe.step(batch(1)), other.step(batch(1)))


def test_an_average_is_saved_resumed_and_refused_where_it_is_not_in_the_checkpoint(plan, tmp_path):
    pipe = again(plan)
    pipe.checkpoint(tmp_path / "without")
    ema = panpipe.weights.ema(pipe, 0.9)
    pipe.step(batch())
    pipe.checkpoint(tmp_path / "with")
    ema.save(tmp_path / "weights")
    kept = {name: tensor.clone() for name, tensor in ema.tensors.items()}
    [file] = (tmp_path / "weights").glob("*.safetensors")
    saved = load_file(file)
    assert all(torch.equal(saved[name], kept[name]) for name in kept)
    held = pipe.state_dict()["ema"]["0"]
    assert held["updates"] == 1
    assert all(torch.equal(held["tensors"][name], kept[name]) for name in kept)
    one = again(even(1, 4))
    again_ema = panpipe.weights.ema(one, 0.9)
    one.resume(tmp_path / "with")
    assert again_ema.updates == 1
    assert all(torch.equal(again_ema.tensors[name], kept[name]) for name in kept)
    with pytest.raises(panpipe.RequestError, match=r"has no 'ema\.0\.tensors\.0\.weight'.* written without"):
        one.resume(tmp_path / "without")


@pytest.mark.parametrize("given", [{"decay": 1.5}, {"decay": True}, {"decay": "0.9"}, {"function": 3}])
def test_invalid_arguments_of_an_average_are_refused(plan, given):
    with pytest.raises(panpipe.RequestError, match=r"decay is|function is"):
        panpipe.weights.ema(again(plan), **given)


def test_on_parameters_calls_the_function_once_for_every_parameter(plan):
    pipe = again(plan)
    pipe.step(batch())
    seen = panpipe.weights.on_parameters(
        pipe, lambda name, parameter: (parameter.grad is not None, parameter.clamp_(-0.1, 0.1).shape)
    )
    assert list(seen) == [name for name, _ in pipe._session.model.named_parameters()]
    assert all(there for there, _ in seen.values())
    assert all(p.abs().max() <= 0.1 for p in pipe._session.model.parameters())


def test_on_parameters_seeds_random_numbers_by_step_and_parameter(plan):
    def drawn(name, parameter):
        return torch.rand(()).item()

    first, second = again(plan), again(plan)
    numbers = panpipe.weights.on_parameters(first, drawn)
    torch.rand(3)
    assert panpipe.weights.on_parameters(second, drawn) == numbers
    assert len(set(numbers.values())) == len(numbers)
    assert panpipe.weights.on_parameters(first, drawn) != numbers
