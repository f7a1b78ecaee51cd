"""The results of a captured function: loss, weight and metrics, or rows, and what is refused."""

import pytest
import torch
from panpipe.core.capture.graph.nodes import WITH_PREVIOUS
from panpipe.core.capture.graph.outputs import (
    ResultRows,
    StepOutputs,
    keep_weight_with_loss,
    parts_in_words,
    row_outputs,
    step_outputs,
)
from panpipe.core.errors import RequestError
from torch import nn

ROWS = 2


def program_of(function):
    """An exported function of x (2 by 3) and labels (2, int64)."""

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x, labels):
            return function(x * self.scale, labels)

    return torch.export.export(Whole(), (torch.ones(ROWS, 3), torch.ones(ROWS, dtype=torch.int64)), strict=False)


def of_step(function, line=""):
    return step_outputs(program_of(function), line)


def of_rows(function, rows=None):
    program = program_of(function)
    return row_outputs(program, rows or ResultRows(ROWS)), program.graph


def test_step_that_returns_a_loss_alone_has_no_weight_and_metrics():
    found = of_step(lambda x, y: x.mean())
    assert (found.loss, found.weight, found.metrics) == ("mean", None, {})
    assert found.nodes == ["mean"]
    assert found.main_result == "mean"


def test_weight_and_metrics_are_found_after_the_loss():
    found = of_step(lambda x, y: (x.mean(), x.sum(), {"n": 3, "top": x.amax()}))
    assert (found.loss, found.weight) == ("mean", "sum_1")
    assert dict(found.metrics) == {"n": 3, "top": "amax"}
    assert found.nodes == ["mean", "sum_1", "amax"]
    only = of_step(lambda x, y: [x.mean(), {"top": x.amax()}])
    assert (only.weight, dict(only.metrics)) == (None, {"top": "amax"})
    assert of_step(lambda x, y: (x.mean(), 2.5)).weight == 2.5


REFUSED = {
    "no result": (lambda x, y: None, "returns NoneType and not a scalar loss"),
    "three parts": (lambda x, y: (x.mean(), 1.0, 2.0), "returns tuple and not a scalar loss"),
    "a dict": (lambda x, y: {"loss": x.mean()}, "returns dict and not a scalar loss"),
    "a number": (lambda x, y: (1.0, x.mean()), "returns tuple and not a scalar loss"),
    "rows": (lambda x, y: x, r"returns a torch.float32 tensor of shape \(2, 3\), which is not a scalar loss.*mean"),
    "a count": (lambda x, y: y.sum(), r"returns a torch.int64 tensor of shape \(\), which is not a scalar loss"),
}


@pytest.mark.parametrize(("function", "reason"), REFUSED.values(), ids=REFUSED)
def test_other_results_are_no_loss(function, reason):
    with pytest.raises(RequestError, match=f"^train.py:3: the step {reason}"):
        of_step(function, "train.py:3")
    with pytest.raises(RequestError, match=f"^the step {reason}"):
        of_step(function)


def test_rows_of_any_nesting():
    found, _ = of_rows(lambda x, y: {"out": x + 1, "none": None, "label": y * 2})
    assert found.values == ("add", None, "mul_1")
    assert found.dims == (0, 0, 0)
    assert found.main_result == "mul_1"
    assert found.nodes == ["add", "mul_1"]
    assert parts_in_words(found) == "{'out': tensor, 'none': None, 'label': tensor}"


def test_result_that_is_an_input_is_copied():
    found, graph = of_rows(lambda x, y: (y, x))
    (copy,) = (node for node in graph.nodes if node.target is torch.ops.aten.clone.default)
    assert found.values == (copy.name, "mul")
    assert copy.args[0].op == "placeholder"
    assert copy.meta["val"].dtype == torch.int64
    assert copy in graph.output_node().all_input_nodes


def test_rows_along_another_dimension():
    found, _ = of_rows(lambda x, y: (x.t(), x), ResultRows(ROWS, ((1,), (0,))))
    assert found.dims == (1, 0)


def test_dimension_of_rows_must_be_one_and_fit():
    x = torch.ones(2, 3)
    assert ResultRows(2).of(0, x) == 0
    assert ResultRows(3).of(0, x) is None
    assert ResultRows(3, ((1,),)).of(0, x) == 1
    assert ResultRows(2, ((0,),)).of(1, x) is None  # more results than known
    assert ResultRows(2, ((0, 1),)).of(0, x) is None
    assert ResultRows(2, ((2,),)).of(0, x) is None
    assert ResultRows(2).of(0, torch.ones(())) is None


NO_ROWS = {
    "other rows": (lambda x, y: x[:1], r"returns a tensor of shape \(1, 3\) for 2 samples"),
    "a scalar": (lambda x, y: x.sum(), "returns a scalar for 2 samples"),
    "a number": (lambda x, y: (x, 5), "returns None for 2 samples|returns 5 for 2 samples"),
    "nothing": (lambda x, y: None, "returns no tensor"),
}


@pytest.mark.parametrize(("function", "reason"), NO_ROWS.values(), ids=NO_ROWS)
def test_results_without_rows_are_refused(function, reason):
    with pytest.raises(RequestError, match=reason):
        of_rows(function)


def weighted(function, given=()):
    program = program_of(function)
    outputs = step_outputs(program)
    return outputs, keep_weight_with_loss(program.graph, outputs, set(given)), program.graph


def test_weight_of_the_model_is_computed_with_the_loss():
    outputs, found, graph = weighted(lambda x, y: (x.mean(), x.sum()))
    nodes = {node.name: node for node in graph.nodes}
    weight, loss = nodes[found.weight], nodes[found.loss]
    assert (weight.args, loss.args) == ((nodes[outputs.weight],), (nodes[outputs.loss],))
    order = [node.name for node in graph.nodes]
    assert order.index(found.loss) == order.index(found.weight) + 1
    assert (weight.meta[WITH_PREVIOUS], loss.meta[WITH_PREVIOUS]) == (False, True)
    returned = graph.output_node().all_input_nodes
    assert weight in returned
    assert loss in returned
    assert nodes[outputs.loss] not in returned
    graph.lint()


def test_weight_of_the_batch_alone_stays():
    outputs, found, _ = weighted(lambda x, y: (x.mean(), y.sum()), ["labels"])
    assert found is outputs
    outputs, found, _ = weighted(lambda x, y: (x.mean(), y.sum()))
    assert found != outputs  # no placeholder is given
    outputs, found, _ = weighted(lambda x, y: (x.mean(), 2.0))
    assert found is outputs


def test_parts_of_a_result_are_named_in_words():
    assert parts_in_words(StepOutputs("l", None, {})) == "a loss"
    assert parts_in_words(StepOutputs("l", 1.0, {"a": "x", "b": 2})) == "a loss, a weight, 'a', 'b'"
