"""The tail of a step: what it reads of an observed run, and its Python as one operator of another run."""

import functools
import math

import pytest
import torch
from panpipe.core.capture.graph.autograd_functions import holding
from panpipe.core.capture.regions.tail import Recorder, TailRegion, numbered
from panpipe.core.errors import RequestError
from torch import nn

LINE = "train.py:7"
NAMES = ["exp", "add", "sum", "tolist"]
"""The calls up to the one that needs a value: ``float(total)``."""


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.early = nn.Parameter(torch.zeros(2))
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0


def step(model, batch):
    made = batch["x"].exp()
    total = (made + model.early).sum()
    factor = 2 if total.tolist() > 0 else 3
    model.count += 1
    return factor * (made * model.weight).sum(), {"factor": factor}


@pytest.fixture
def batch():
    with holding():  # the regions, until their backwards
        yield {"x": torch.zeros(2)}


def state_of(model):
    return dict(model.named_parameters()), dict(model.named_buffers())


def observed(batch, names=NAMES, step=step):
    model, recorder = Model(), Recorder(lambda: 3)
    with numbered(model, [], recorder):
        result = step(model, batch)
    model.count.zero_()
    return model, TailRegion.observed(*state_of(model), recorder, names, result, 5, LINE)


def test_tail_reads_what_was_computed_before_it_and_the_state_that_nothing_before_it_reads(batch):
    _, tail = observed(batch)
    assert tail.line == LINE
    assert dict(tail.places) == {(0, 0): (0, 0), (2, 0): (2, 0)}  # the results of exp and sum
    assert tail.state == ("weight", "count")  # not `early`, which is read before the tail alone
    assert tail.written == ("count",)
    assert [(made.shape, made.dtype) for made in tail.made] == [
        ((), torch.float32), ((), torch.float64), ((), torch.float32)
    ]  # the loss, the number, the buffer  # fmt: skip
    assert tail.draws == 2


def test_places_are_those_of_the_capture(batch):
    """During capture a library may call more functions than in the observed run."""
    _, tail = observed(batch, ["ones", *NAMES])
    assert dict(tail.places) == {(0, 0): (1, 0), (2, 0): (3, 0)}


def test_tail_whose_tensors_are_not_in_the_capture_is_refused(batch):
    with pytest.raises(RequestError, match=rf"{LINE}: .*the step calls other operators when it is captured"):
        observed(batch, ["add", "sum", "tolist"])


def run(model, tail, batch, step=step):
    """Call the tail as a capture does, in a run whose values its calls do not read."""
    recorder = Recorder()
    with numbered(model, [], recorder):
        (batch["x"].exp() + model.early).sum()
    return tail.call(model, step, [], model, batch, recorder)


@pytest.mark.parametrize(("x", "factor"), [([0.0, 0.0], 2), ([-200.0, -200.0], 3)])
def test_call_runs_the_tails_python_again_for_each_value(batch, x, factor):
    model, tail = observed(batch)
    model.early.data.fill_(-1e-3 if factor == 3 else 0.0)
    found, metrics = run(model, tail, {"x": torch.tensor(x)})
    assert metrics["factor"].item() == factor
    assert found.item() == factor * (torch.tensor(x).exp() @ model.weight.detach()).item()
    assert model.count.item() == 1  # once, and not by the run before the tail


def test_gradients_flow_through_the_tail(batch):
    model, tail = observed(batch)
    x = torch.tensor([0.5, -0.5], requires_grad=True)
    loss, _ = run(model, tail, {"x": x})
    loss.backward()
    torch.testing.assert_close(model.weight.grad, 2 * x.detach().exp())
    torch.testing.assert_close(x.grad, 2 * x.detach().exp() * model.weight.detach())


def test_tensor_that_is_not_found_during_capture_is_refused(batch):
    model, tail = observed(batch)
    with pytest.raises(
        RequestError, match=rf"{LINE}: .*what it reads cannot be found again while the step is captured"
    ):
        tail.call(model, step, [], model, batch, Recorder())


def test_tensor_that_the_example_did_not_read_and_another_call_before_the_tail_are_refused(batch):
    def reading(model, batch):
        made = batch["x"].exp()
        other = made + model.early
        return (made.sum() if other.sum().tolist() > 0 else other.sum()) * model.weight.sum()

    model, tail = observed(batch, step=reading)
    with pytest.raises(RequestError, match=rf"{LINE}: after this line the step reads a tensor in sum that it did not"):
        run(model, tail, {"x": torch.full((2,), -200.0)}, step=reading)
    with pytest.raises(RequestError, match=rf"{LINE}: the step calls sin here where it called exp for the example"):
        run(model, tail, batch, step=lambda model, batch: batch["x"].sin())


def test_tail_may_read_metadata_of_what_it_does_not_read_and_gets_the_argument_that_a_call_returned():
    def reading(model, batch):
        made = batch["x"].exp()
        kept = made.add_(0)
        other = (made + model.early).t()
        if kept.sum().tolist() > 0:
            return (kept * model.weight).sum() * other.numel() * len(other) * (other.stride(0) + other.is_contiguous())
        return made.sum()

    with holding():
        model, tail = observed({"x": torch.zeros(2)}, ["exp", "add_", "add", "t", "sum", "tolist"], step=reading)
        recorder, x = Recorder(), torch.ones(2)
        with numbered(model, [], recorder):
            made = x.exp()
            made.add_(0), (made + model.early).t(), made.sum()
        found = tail.call(model, reading, [], model, {"x": x}, recorder)
    assert found.item() == pytest.approx(8 * 3 * math.e)


def writing(read):
    def step(model, batch):
        made = batch["x"].exp()
        view = made[:]
        total = (made + model.early).sum()
        if total.tolist() > 0:
            made *= 2
        return (read(made, view) * model.weight).sum()

    return step


def test_tail_writes_in_place_what_was_computed_before_it():
    step = writing(lambda made, view: made)
    with holding():
        model, tail = observed({"x": torch.zeros(2, requires_grad=True)}, ["exp", "__getitem__", *NAMES[1:]], step=step)
        x = torch.tensor([0.5, -0.5], requires_grad=True)
        recorder = Recorder()
        with numbered(model, [], recorder):
            made = x.exp()
            made[:], (made + model.early).sum()
        tail.call(model, step, [], model, {"x": x}, recorder).backward()
    torch.testing.assert_close(model.weight.grad, 2 * x.detach().exp())
    torch.testing.assert_close(x.grad, 2 * x.detach().exp() * model.weight.detach())


def test_function_with_a_cache_of_its_results_runs_again_in_each_run_of_the_tail(batch):
    @functools.lru_cache(maxsize=1)
    def doubled(tensor):
        return tensor * 2

    def caching(model, batch):
        table = doubled(torch.ones(2))
        total = (batch["x"] * table).sum()
        return (model.weight * (1 if total.tolist() > 0 else 3)).sum()

    model, tail = observed(batch, ["ones", "mul", "mul", "sum", "tolist"], step=caching)
    for _ in range(2):
        recorder = Recorder()
        with numbered(model, [], recorder):
            (batch["x"] * doubled(torch.ones(2))).sum()
        assert tail.call(model, caching, [], model, batch, recorder).item() == 9
