"""Traces of a step with another number of samples: what runs, what is read, which results have rows."""

import torch
from panpipe.core.capture.batch.row_rules import POSITIONAL
from panpipe.core.capture.batch.row_trace import RowTracer, with_lists
from panpipe.core.capture.values.containers import flatten_batch
from torch import nn

X, Y, SPARE = "batch['x']", "batch['y']", "batch['spare']"
DIMS = {X: 0, Y: 0}


def step(model, batch):
    out = model(batch["x"])
    return (out - batch["y"][:, None]).square().mean(), out


def batch():
    return {"x": torch.ones(2, 3), "y": torch.ones(2), "spare": torch.ones(2)}


def tracer(of=step, given=None, model=None):
    return RowTracer(model or nn.Linear(3, 2), of, batch() if given is None else given, gradients=True)


def test_trace_of_independent_samples():
    found = tracer().trace(DIMS)
    assert (found.rows, found.runs, found.carries, found.independent) == (61, True, True, True)
    assert found.results == ((), (0,))
    assert found.read == {X, Y}
    assert found.refusal is None


def test_prime_divides_no_other_size():
    assert tracer(model=nn.Sequential(nn.Linear(3, 61), nn.Linear(61, 134))).trace(DIMS).rows == 71


def test_dimension_without_samples_does_not_carry():
    found = tracer(lambda model, batch: model(batch["x"]).sum()).trace({SPARE: 0})
    assert (found.runs, found.carries, found.independent, found.reach) == (True, False, False, 0)


def test_failing_step_has_a_reason_with_its_line():
    found = tracer().trace({X: 0})  # y has 2 rows
    assert not found.runs
    assert not found.carries
    line = step.__code__.co_firstlineno + 2
    assert found.reason.startswith(f"{__file__}:{line} in step: ")
    assert found.refusal is None


def test_message_of_an_error_without_text_is_its_class():
    def fails(model, batch):
        raise KeyError

    assert tracer(fails).trace(DIMS).reason.endswith("in fails: KeyError")


def test_positional_operator_is_a_finding_of_its_kind():
    found = tracer(lambda model, batch: model(batch["x"]).flip(0).mean()).trace({X: 0})
    assert found.carries
    assert not found.independent
    assert [finding.kind for finding in found.findings] == [POSITIONAL]
    assert found.relation is None


def test_traces_are_kept_and_run_once():
    ran = []

    def counted(model, batch):
        ran.append(tuple(batch["x"].shape))
        return step(model, batch)

    found = tracer(counted)
    assert found.known(DIMS, frozenset()) is None
    first = found.trace(DIMS)
    assert found.trace({**DIMS, SPARE: None}) is first
    assert found.is_independent(DIMS)
    assert found.known(DIMS, frozenset()) is first
    assert len(ran) == 0  # changes of Python are undone
    found.trace({X: 0})
    assert not found.known({X: 0}, frozenset()).runs
    assert found.known({Y: 0}, frozenset()) is None  # not traced


def test_trace_that_stops_at_a_finding_is_not_kept():
    found = tracer(lambda model, batch: model(batch["x"]).flip(0).mean())
    assert not found.is_independent({X: 0})
    assert found.known({X: 0}, frozenset()) is None


def test_other_numbers_of_samples():
    found = tracer()
    assert found.trace_groups(DIMS).rows == 12 * 61
    five = found.trace_with(DIMS, frozenset(), 5)
    assert (five.rows, five.results) == (5, ((), (0,)))
    assert found.trace_with(DIMS, frozenset(), None).runs  # the example's rows
    grouped = tracer(lambda model, batch: model(batch["x"].view(-1, 4, 3)).mean())
    assert not grouped.trace({X: 0}).runs
    assert grouped.trace_groups({X: 0}).independent


def test_step_that_asks_for_a_bool_runs_again_with_true():
    def step(model, batch):
        if not (batch["x"] > 0).all():
            raise ValueError("needs positive values")
        return model(batch["x"]).mean()

    assert tracer(step).trace({X: 0}).independent


def test_model_and_outer_objects_do_not_change():
    seen, model = {"count": 0}, nn.BatchNorm1d(3)

    def step(model, batch):
        seen["count"] = seen["count"] + 1
        return model(batch["x"]).mean()

    assert tracer(step, model=model).trace({X: 0}).runs
    assert seen == {"count": 0}
    assert model.num_batches_tracked == 0
    assert not any(p.is_meta for p in model.parameters())


def test_capture_by_dynamo_is_traced():
    found = tracer().by_dynamo().trace(DIMS)
    assert (found.independent, found.results) == (True, ((), (0,)))


def test_lists_have_an_element_for_each_sample():
    def step(model, batch):
        return model(torch.stack(batch["x"])).mean()

    found = tracer(step, {"x": [torch.ones(3), torch.ones(3)]})
    assert found.trace({}, frozenset({X})).independent
    assert found.trace({}).reach == 0


def test_lists_of_a_batch_get_other_elements():
    given = {"x": [1, 2], "deep": ([3], 4), "other": [5]}
    leaves, nesting = flatten_batch(given)
    found, other = with_lists(leaves, nesting, frozenset({X, "batch['deep'][0]"}), lambda held: held * 2)
    assert other.batch(found) == {"x": [1, 2, 1, 2], "deep": ([3, 3], 4), "other": [5]}
    assert given["x"] == [1, 2]
