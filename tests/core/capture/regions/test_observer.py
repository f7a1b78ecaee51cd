"""An observed run of a step: results of its calls, and what its tail reads and writes."""

import pytest
import torch
from panpipe.core.capture.regions.calls import Slot
from panpipe.core.capture.regions.observer import Observer

F32 = torch.float32
NAMES = ["exp", "relu", "add", "sum"]


@pytest.fixture
def draws():
    return [0]


def observed(step, draws=(0,)):
    observer = Observer(lambda: draws[0])
    with observer:
        result = step()
    return observer, result


def chain(weight, x):
    def step():
        made = x.exp()
        other = made.relu()
        return ((made + weight).sum(), other)

    return step


@pytest.fixture
def tensors():
    return torch.ones(2), torch.zeros(2)


def test_tail_reads_what_was_computed_before_it(tensors):
    observer, result = observed(chain(*tensors))
    tail, number = observer.tail(NAMES[:3], result[0])
    assert number == {0: 0, 1: 1, 2: 2}
    assert tail.record.until == 2
    assert list(tail.needed) == [(0, 0)]  # exp
    assert tail.needed[0, 0].tolist() == [1, 1]
    assert [t is tensors[0] for t in tail.touched.values()] == [True]
    assert id(tensors[1]) in tail.before
    assert id(tensors[0]) not in tail.before


def test_result_that_was_computed_before_is_needed(tensors):
    observer, result = observed(chain(*tensors))
    assert set(observer.tail(NAMES[:3], result)[0].needed) == {(0, 0), (1, 0)}


def test_results_of_calls_are_recorded_without_their_values(tensors):
    def step():
        halves = tensors[0].chunk(2)
        tensors[1].add_(1)
        return halves[0].tolist()

    observer, _ = observed(step)
    tail, _ = observer.tail(["chunk", "add_", "tolist"], None)
    assert tail.record.names == ["chunk", "add_", "tolist"]
    slots = [leaves for _, leaves in tail.record.returned]
    assert slots[0] == [Slot((1,), (1,), F32, False, None)] * 2
    assert slots[1] == [Slot((2,), (1,), F32, False, 0)]  # its argument
    assert slots[2] == [1.0]


def test_tensors_that_the_tail_writes(tensors):
    weight, x = tensors

    def step():
        x.mul_(2)
        weight.add_(x)

    observer, _ = observed(step)
    tail, _ = observer.tail(["mul_", "add_"], None)
    assert tail.written == {id(weight)}
    assert observer.tail(["mul_"], None)[0].written == {id(weight), id(x)}


def test_draws_before_the_tail_are_counted(tensors, draws):
    def step():
        made = tensors[0].exp()
        draws[0] = 3
        made = made.relu()
        draws[0] = 5
        return made

    observer, result = observed(step, draws)
    assert observer.tail(["exp", "relu"], result)[0].draws == 3
    assert observer.tail(["exp", "relu", "other", "more"], result)[0].draws == 5  # the tail has no call at all


def test_calls_before_the_tail_that_read_values_run_again(tensors):
    weight, x = tensors

    def step():
        made = x.exp()
        made.tolist()
        weight.tolist()
        return made.sum()

    observer, result = observed(step)
    tail, _ = observer.tail(["exp", "tolist", "tolist", "sum"], result)
    assert tail.record.reads == {1, 2}
    assert set(tail.needed) == {(0, 0)}
    assert id(weight) in tail.touched


def test_tail_starts_after_the_last_known_call_if_capture_calls_another(tensors):
    observer, result = observed(chain(*tensors))
    tail, number = observer.tail(["exp", "relu", "only_in_capture"], result[0])
    assert tail.record.until == 2
    assert number == {0: 0, 1: 1}


def test_operators_give_the_same_results_as_without_it(tensors):
    _, found = observed(chain(*tensors))
    wanted = chain(*tensors)()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
