"""Consecutive runs of a step on fake tensors, each with the Python state that the one before left."""

import pytest
import torch
from panpipe.core.capture.export.run_record import first_difference
from panpipe.core.capture.export.trial_runs import Leaf, TrialRuns, leaves_of
from panpipe.core.capture.python.reachable.reach import reach
from panpipe.core.errors import RequestError
from torch import nn
from torch.utils.checkpoint import checkpoint

BATCH = {"x": torch.ones(2, 3), "n": 4}


def runs_of(step, model=None):
    model = model or nn.BatchNorm1d(3)
    leaves, nesting = leaves_of(BATCH)
    return TrialRuns(model, step, nesting, torch.device("cpu"), True, reach(model, step)), leaves


def test_leaves_have_shapes_and_types_of_tensors():
    leaves, nesting = leaves_of({"x": torch.ones(2, 3, dtype=torch.int8).t(), "n": 4})
    assert leaves == (Leaf((3, 2), (1, 3), torch.int8), 4)
    assert nesting.batch(["a", "b"]) == {"x": "a", "n": "b"}


def test_run_after_a_count_differs_from_the_first():
    state = {"count": 0}

    def step(model, batch):
        state["count"] = state["count"] + 1
        return model(batch["x"]).mean() * state["count"]

    runs, leaves = runs_of(step)
    with runs.apart():
        first, second = runs.run(leaves), runs.run(leaves)
        assert state["count"] == 2
        assert runs.now().values["state['count']"] == reach(runs.model, step).values["state['count']"]
    assert first_difference(first, first) is None
    assert first_difference(first, second) is not None
    assert state["count"] == 0
    assert runs.ended
    assert runs.read_kept == ""


def test_model_keeps_its_tensors_and_values():
    runs, leaves = runs_of(lambda model, batch: model(batch["x"]).mean())
    weight = runs.model.weight
    with runs.apart():
        runs.run(leaves)
        assert runs.model.weight is not weight
    assert runs.model.weight is weight
    assert runs.model.num_batches_tracked == 0


def test_number_is_the_result_of_item():
    seen = []

    def step(model, batch):
        seen.append((batch["x"].sum().item(), batch["n"], bool((batch["x"] > 0).all())))
        return model(batch["x"]).mean() * batch["x"].sum().item()

    runs, leaves = runs_of(step)
    with runs.apart():
        one = runs.run(leaves)
        other = runs.run(leaves, number=2.5)
        assert seen == [(1.0, 4, False), (2.5, 4, False)]
    assert runs.gave_number
    assert first_difference(one, other) is not None


def test_step_without_numbers_gets_none():
    runs, leaves = runs_of(lambda model, batch: model(batch["x"]).mean())
    with runs.apart():
        runs.run(leaves)
    assert not runs.gave_number


def test_run_that_fails_has_not_ended():
    def step(model, batch):
        model(batch["x"])
        raise KeyError("x")

    runs, leaves = runs_of(step)
    with runs.apart():
        assert len(runs.run(leaves)) > 0
    assert not runs.ended


def test_tensor_of_an_earlier_run_is_noted_with_its_line():
    kept = {"last": None}

    def step(model, batch):
        out = model(batch["x"]).mean()
        if kept["last"] is not None:
            out = out + kept["last"]
        kept["last"] = out.detach()
        return out

    runs, leaves = runs_of(step)
    with runs.apart():
        runs.run(leaves)
        assert runs.read_kept == ""
        runs.run(leaves)
    assert runs.read_kept == f"{__file__}:{step.__code__.co_firstlineno + 3}"
    assert kept["last"] is None


def test_gradients_of_tensors_outside_of_the_model_are_found():
    scale = torch.ones(1, requires_grad=True)
    runs, leaves = runs_of(lambda model, batch: (model(batch["x"]) * scale).mean())
    with runs.apart():
        runs.run(leaves)
    assert any(tensor is scale for tensor in runs.given)


def test_values_of_buffers_that_no_run_writes():
    model = nn.Linear(3, 3)
    model.register_buffer("table", torch.tensor([1.0, 2.0, 3.0]))
    for name in ("replaced", "written"):
        model.register_buffer(name, torch.ones(3))

    def step(model, batch):
        model.replaced = model.table * 2
        model.written.add_(1)
        return (model(batch["x"]) * model.table).mean()

    runs, leaves = runs_of(step, model)
    with runs.apart():
        runs.run(leaves)
        found = runs.values().known
    assert [value.tolist() for value in found.values()] == [[1.0, 2.0, 3.0]]


def test_buffers_that_a_run_has_written_are_no_constants_in_later_runs():
    model = nn.Linear(3, 3)
    for name in ("table", "replaced", "written"):
        model.register_buffer(name, torch.ones(3))

    def step(model, batch):
        model.table.sin(), model.replaced.cos(), model.written.tan()
        model.replaced = model.table * 2
        model.written.add_(1)
        return model(batch["x"]).mean()

    runs, leaves = runs_of(step, model)
    with runs.apart():
        before, values = runs.run(leaves), runs.values()
    with runs.apart():
        after = runs.run(leaves, values=values)
    names = ["aten.sin.default", "aten.cos.default", "aten.tan.default"]
    assert [ran.what[0] for ran in before if ran.what[0] in names] == names
    # `table` is a constant; `replaced` and `written` have other values in each run
    assert [ran.what[0] for ran in after if ran.what[0] in names] == names[1:]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_functions_are_called_directly(reentrant):
    """Otherwise they run without gradients, or with hooks on what they save."""
    seen = []

    def inner(x):
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        seen.append((torch.is_grad_enabled(), hooks))
        return x.sin()

    def step(model, batch):
        return checkpoint(inner, model(batch["x"]), use_reentrant=reentrant).mean()

    runs, leaves = runs_of(step)
    with runs.apart():
        runs.run(leaves)
        assert seen == [(True, None)]
    assert runs.ended


def test_refusal_inside_the_context_gets_out():
    runs, _ = runs_of(lambda model, batch: model(batch["x"]).mean())
    with pytest.raises(RequestError, match="from within"), runs.apart():
        raise RequestError("from within")
