"""An exported program as a captured step: what its placeholders are, rewrites of its graph, and what is refused."""

from types import SimpleNamespace

import pytest
import torch
from panpipe.core.capture.export.captured_step import TAIL, captured_step
from panpipe.core.capture.graph.outputs import ResultRows, RowOutputs
from panpipe.core.capture.regions.modes import modes_as_calls
from panpipe.core.capture.values.capture_errors import LateSize, WritesTensor
from panpipe.core.capture.values.user_lines import lines_recorded
from panpipe.core.errors import RequestError
from torch import nn


class Whole(nn.Module):
    """What is exported: the result of a step, and no texts."""

    def __init__(self, model, step):
        super().__init__()
        self.model, self.step = model, step

    def forward(self, *leaves):
        return self.step(self.model, *leaves), ()


def captured(step, *leaves, model=None, lines=None, **options):
    whole = Whole(model or nn.BatchNorm1d(3), step)
    with modes_as_calls(), lines_recorded():
        program = torch.export.export(whole, leaves, strict=False)
    names = {f"model.{name}": name for name in (*whole.model.state_dict(),)}
    breaks = SimpleNamespace(assigned=(), step=step, lines=lines or {}, causes={})
    return captured_step(program, names, len(leaves), "Net", breaks, **options)


def targets(step):
    return [str(node.target) for node in step.graph.nodes if node.op == "call_function"]


def test_placeholders_are_sorted_into_batch_parameters_and_buffers():
    table = torch.arange(3.0)
    found = captured(
        lambda model, x, unused, y: (model(x) * table - y).mean(), torch.ones(2, 3), 7, torch.ones(2, 3),
        lines={"": "train.py:1", "block": "train.py:2"}, gradients=False, held=["module"],
    )  # fmt: skip
    assert list(found.batch.values()) == [0, 1, 2]
    assert set(found.parameters.values()) == {"weight", "bias"}
    assert set(found.buffers.values()) == {"running_mean", "running_var", "num_batches_tracked"}
    assert [constant.tolist() for constant in found.constants.values()] == [[0, 1, 2]]
    assert found.mutated_buffers == {"running_mean", "running_var", "num_batches_tracked"}
    assert found.regions == {TAIL: "train.py:1", "block": "train.py:2"}
    assert (found.model_name, found.gradients, found.held) == ("Net", False, ["module"])
    assert found.outputs.loss == next(n.name for n in found.graph.nodes if str(n.target) == "aten.mean.default")
    assert found.batch_writes == {}
    weight = next(node for node in found.graph.nodes if node.name in found.parameters)
    assert weight.meta["val"].fake_mode is found.fake_mode


def test_buffers_of_evaluation_are_not_written():
    assert captured(lambda model, x: model(x).mean(), torch.ones(2, 3), model=nn.BatchNorm1d(3).eval()
                    ).mutated_buffers == frozenset()  # fmt: skip


def test_batch_that_is_written_is_copied_and_its_line_is_known():
    def step(model, y, x):
        x.mul_(2)
        return (model(x) + y).mean()

    found = captured(step, torch.ones(2, 3), torch.ones(2, 3))
    assert found.batch_writes == {1: f"{__file__}:{step.__code__.co_firstlineno + 1}"}
    places = targets(found)
    assert places.index("aten.clone.default") < places.index("aten.mul_.Tensor")


def test_generators_of_random_operators_are_removed():
    generator = torch.Generator()

    def step(model, x):
        return (model(x) * torch.rand(2, 3, generator=generator)).mean()

    found = captured(step, torch.ones(2, 3))
    drawn = next(node for node in found.graph.nodes if "rand" in str(node.target))
    assert drawn.kwargs.get("generator") is None


def test_size_that_depends_on_values_is_late():
    with pytest.raises(LateSize, match=r"aten\.nonzero\.default returns something of data-dependent size"):
        captured(lambda model, x: model(x).mean() + x.nonzero().shape[0], torch.ones(2, 3))


def test_written_parameter_is_refused_with_its_line():
    def step(model, x):
        with torch.no_grad():
            model.weight.mul_(0.9)
        return model(x).mean()

    line = step.__code__.co_firstlineno + 2
    with pytest.raises(RequestError, match=rf"{__file__}:{line}: the step writes parameter 'weight' in place"):
        captured(step, torch.ones(2, 3))


def test_embedding_that_shortens_its_rows_is_refused_with_the_option():
    model = nn.Embedding(4, 2, max_norm=1.5)
    with pytest.raises(RequestError, match=r"max_norm= writes parameter 'weight' in its.*weights\.on_parameters"):
        captured(lambda model, ids: model(ids).mean(), torch.tensor([1, 2]), model=model)


def test_constant_that_is_written_is_not_captured():
    count = torch.zeros(())

    def step(model, x):
        return model(x).mean() + count.add_(1)

    with pytest.raises(WritesTensor):
        captured(step, torch.ones(2, 3))


def test_function_without_a_loss_returns_rows():
    found = captured(lambda model, x: {"y": model(x)}, torch.ones(2, 3), rows=ResultRows(2)).outputs
    assert isinstance(found, RowOutputs)
    assert (len(found.values), found.dims) == (1, (0,))


def test_step_without_a_scalar_loss_is_refused():
    with pytest.raises(RequestError, match=r"tensor of shape \(2, 3\), which is not a scalar loss"):
        captured(lambda model, x: model(x), torch.ones(2, 3))
