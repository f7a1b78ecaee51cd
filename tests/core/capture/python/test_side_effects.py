"""Values outside of modules that a step changes while it is captured: restored, reported, or refused."""

import functools

import pytest
import torch
from panpipe.core.capture.python.reachable.reach import reach
from panpipe.core.capture.python.side_effects import outside_restored, tensors_restored
from panpipe.core.errors import RequestError
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

MODEL = nn.Linear(2, 2)
HELD, SEEN, COUNT = {"n": 1, "old": torch.zeros(1)}, [1.0], 1


class Counter:
    total = 0


@functools.lru_cache
def table(size):
    return [size]


@pytest.fixture(autouse=True)
def fresh():
    global COUNT  # noqa: PLW0603 - as a step of the user
    COUNT = 1
    HELD.clear()
    HELD.update(n=1, old=torch.zeros(1))
    SEEN[:] = [1.0]
    Counter.total = 0
    table.cache_clear()


def fake():
    with FakeTensorMode():
        return torch.ones(1)


def counts(model, batch):
    global COUNT  # noqa: PLW0603 - as a step of the user
    COUNT += 1
    return batch.sum() if COUNT > 3 else batch


def records(model, batch):
    SEEN.append(batch.sum())
    return batch


def keeps(model, batch):
    HELD["new"] = batch
    HELD["old"] = batch
    return batch


def adds(model, batch):
    Counter.total += 1
    return batch if Counter.total else -batch


def looks_up(model, batch):
    return batch * table(3)[0]


def run(step, batch=None):
    with outside_restored(reach(MODEL, step), []):
        step(MODEL, fake() if batch is None else batch)


def test_counter_that_the_step_reads_is_restored_and_refused():
    with pytest.raises(RequestError, match=r"test_side_effects.py:\d+: the step reads 'COUNT' here and writes it"):
        run(counts)
    assert COUNT == 1


def test_number_of_a_class_that_the_step_reads_is_restored_and_refused():
    with pytest.raises(RequestError, match=r"the step reads 'Counter\.total' here and writes it, too"):
        run(adds)
    assert Counter.total == 0


def test_list_that_the_step_only_appends_to_is_restored_with_a_warning():
    with pytest.warns(UserWarning, match="the step writes 'SEEN': the Python of a captured step runs only once"):
        run(records)
    assert SEEN == [1.0]


def test_captured_tensors_leave_dicts():
    old = HELD["old"]
    run(keeps)
    assert set(HELD) == {"n", "old"}
    assert HELD["old"] is old


def test_values_are_restored_also_after_an_error():
    def fails(model, batch):
        counts(model, batch)
        SEEN.append(2.0)
        raise KeyError("the step's own")

    with pytest.raises(KeyError, match="own"):
        run(fails)
    assert (COUNT, SEEN) == (1, [1.0])


def test_cache_that_was_filled_is_cleared():
    table(1)
    run(looks_up)
    assert table.cache_info().currsize == 0
    table(3)
    run(looks_up)  # a hit
    assert table.cache_info().currsize == 1


def test_attributes_of_modules_are_left_to_others():
    with outside_restored(reach(MODEL, keeps), [HELD]):
        HELD["n"] = 5
    assert HELD["n"] == 5


def test_tensors_of_an_observed_run_are_removed_and_numbers_stay():
    reached = reach(MODEL, lambda model, batch: (HELD["n"], HELD["old"], HELD["x"], SEEN))
    old = HELD["old"]
    with tensors_restored(reached):
        HELD.update(x=torch.ones(1), y=5, n=2, old=torch.ones(1))
        SEEN.append(torch.ones(1))
    assert set(HELD) == {"n", "old", "y"}
    assert (HELD["n"], HELD["y"], HELD["old"] is old, SEEN) == (2, 5, True, [1.0])


@pytest.mark.parametrize("fails", [False, True])
def test_tensors_may_stay_unless_the_run_fails(fails):
    reached = reach(MODEL, lambda model, batch: HELD["x"])
    try:
        with tensors_restored(reached, after_failure=True):
            HELD["x"] = torch.ones(1)
            if fails:
                raise ValueError
    except ValueError:
        assert fails
    assert ("x" in HELD) is not fails
