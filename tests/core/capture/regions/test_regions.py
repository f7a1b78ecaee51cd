"""Regions: a part that stays Python as one operator, with its gradients, draws and shapes."""

import pytest
import torch
from panpipe.core.capture.graph.autograd_functions import holding
from panpipe.core.capture.graph.randomness import KeyedRandom, random_key
from panpipe.core.capture.regions.regions import (
    Region,
    TensorSpec,
    call_region,
    copy_on_meta,
    is_no_gradient,
    trained,
)
from panpipe.core.errors import RequestError
from torch import nn

X = torch.tensor([1.0, 2.0])


def region(run, made=((2,),), given=(X,), draws=0, name="block"):
    reads = [x.clone().requires_grad_() for x in given]
    return Region(name, "train.py:3", run, tuple(TensorSpec(m, torch.float32) for m in made), trained(reads), draws)


def test_made_has_shape_and_dtype():
    made = TensorSpec.like(torch.zeros(2, 3, dtype=torch.int8))
    assert made == TensorSpec((2, 3), torch.int8)
    assert (made.empty(torch.device("meta")).shape, made.empty(torch.device("meta")).dtype) == ((2, 3), torch.int8)


def test_inputs_that_get_a_gradient():
    assert trained([X, X.clone().requires_grad_()]) == {1: TensorSpec((2,), torch.float32)}


def test_region_computes_results_and_gradients_of_its_function():
    one = region(lambda v: [v[0] * v[1]], given=(X, X))
    found, ticket = one.forward([X, X + 1], None, 0)
    assert found.tolist() == [2, 6]
    assert not found.requires_grad
    flowed = one.backward([torch.tensor([1.0, 10.0])], ticket)
    assert [g.tolist() for g in flowed] == [[2, 30], [1, 20]]
    assert not any(map(is_no_gradient, flowed))
    assert [g.tolist() for g in one.backward([torch.ones(2)], ticket)] == [[2, 3], [1, 2]]  # again


def test_results_share_no_memory_and_are_contiguous():
    given = torch.ones(2, 2)
    one = region(lambda v: [v[0].t()], made=((2, 2),), given=(given,))
    found, _ = one.forward([given], None, 0)
    assert found.is_contiguous()
    assert found.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()


def test_input_that_is_not_used_has_no_gradient():
    one = region(lambda v: [v[0] * 2], given=(X, X))
    _, ticket = one.forward([X, X], None, 0)
    used, unused = one.backward([torch.ones(2)], ticket)
    assert (used.tolist(), unused.tolist()) == ([2, 2], [0, 0])
    assert (is_no_gradient(used), is_no_gradient(unused)) == (False, True)


def test_result_without_a_gradient_gives_none():
    one = region(lambda v: [v[0].detach()])
    _, ticket = one.forward([X], None, 0)
    (found,) = one.backward([torch.ones(2)], ticket)
    assert is_no_gradient(found)


def test_gradients_are_enabled_inside():
    one = region(lambda v: [v[0] * (2 if torch.is_grad_enabled() else 3)])
    with torch.no_grad():
        assert one.forward([X], None, 0)[0].tolist() == [2, 4]


def test_random_numbers_are_drawn_with_the_key_at_the_ordinal():
    key = random_key(1, 2, 3)
    one = region(lambda v: [v[0] * torch.rand(2)], draws=1)
    with KeyedRandom(key):
        torch.rand(2)
        wanted = torch.rand(2)
    assert torch.equal(one.forward([torch.ones(2)], key, 1)[0], wanted)
    assert not torch.equal(one.forward([torch.ones(2)], key, 0)[0], wanted)


def test_another_number_of_draws_is_refused_in_a_module_and_allowed_in_the_tail():
    def run(values):
        return [values[0] * torch.rand(2)]

    with pytest.raises(RequestError, match=r"train.py:3: module 'block' draws 1 random tensors here and drew 0 for"):
        region(run).forward([X], None, 0)
    region(run, name="").forward([X], None, 0)


def test_other_shapes_of_results_are_refused():
    with pytest.raises(RequestError, match=r"returns tensors of shapes \[\(1,\)\] here and returned \[\(2,\)\]"):
        region(lambda v: [v[0][:1]]).forward([X], None, 0)
    with pytest.raises(RequestError, match="the step returns tensors of shapes"):
        region(lambda v: [], name="").forward([X], None, 0)
    with pytest.raises(RequestError, match="returns tensors"):
        region(lambda v: [v[0].double()]).forward([X], None, 0)


def test_sparse_gradients_are_refused():
    table = torch.ones(3, 2)
    one = region(lambda v: [torch.nn.functional.embedding(torch.tensor([1]), v[0], sparse=True)], ((1, 2),), (table,))
    _, ticket = one.forward([table], None, 0)
    with pytest.raises(RequestError, match=r"train\.py:3: module 'block' has sparse gradients"):
        one.backward([torch.ones(1, 2)], ticket)


def test_operator_runs_the_region_and_its_backward():
    given = X.clone().requires_grad_()
    other = X.clone()
    one = Region("block", "l", lambda v: [v[0] * v[1]], (TensorSpec((2,), torch.float32),), trained([given, other]), 0)
    with holding():
        (found,) = call_region(one, [given, other], [])
        found.sum().backward()
    assert found.tolist() == [1, 4]
    assert given.grad.tolist() == [1, 2]
    assert other.grad is None


def test_skeleton_has_no_data_and_keeps_other_tensors():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].bias.requires_grad_(False)
    model[0].table = torch.ones(3)
    model[0].foreign = torch.ones(1)
    stand_in = torch.zeros(1)
    bare = copy_on_meta(model, {id(model[0].foreign): stand_in})
    assert all(t.is_meta for t in (*bare.parameters(), *bare.buffers()))
    assert [p.requires_grad for p in bare.parameters()] == [p.requires_grad for p in model.parameters()]
    assert bare[0].table is model[0].table
    assert bare[0].foreign is stand_in
    assert bare[0] is not model[0]
    assert not any(t.is_meta for t in model.parameters())
