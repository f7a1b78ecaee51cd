"""Grad mode and autocast, recorded at operators of a graph, and applied when it runs."""

import pytest
import torch
from panpipe.core.capture.regions.modes import CASTS, CastWatch, ModalInterpreter, Modes, casts_once, note_modes
from torch import fx

aten = torch.ops.aten
SETS_GRAD = torch._C._set_grad_enabled
ENTERS, EXITS = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
BF16 = ("cpu", torch.bfloat16, True, True)


class Built:
    """A graph of additions, with the calls in between that set modes."""

    def __init__(self):
        self.graph = fx.Graph()
        self.x = self.graph.placeholder("x")
        self.added = []

    def add(self):
        self.added.append(self.graph.call_function(aten.add.Tensor, (self.x, self.x)))

    def set_grad(self, on):
        self.graph.call_function(SETS_GRAD, (on,))

    def enter(self, *arguments):
        return self.graph.call_function(ENTERS, arguments)

    def exit(self, entered):
        self.graph.call_function(EXITS, (entered,))

    def noted(self):
        self.graph.output(self.x)
        note_modes(self.graph)
        assert [node.target for node in self.graph.nodes if node.op == "call_function"] == [aten.add.Tensor] * len(
            self.added
        )
        return [node.meta.get("modes") for node in self.added]


def test_grad_mode_is_recorded_at_each_operator():
    built = Built()
    built.add()
    built.set_grad(False)
    built.add()
    built.set_grad(True)
    built.add()
    assert built.noted() == [None, Modes(False, (), 0), None]


def test_autocasts_are_nested_and_blocks_are_numbered():
    built, lower = Built(), ("cpu", torch.float16, True, False)
    outer = built.enter(*BF16)
    built.add()
    inner = built.enter(*lower)
    built.add()
    built.exit(inner)
    built.add()
    built.exit(outer)
    built.add()
    again = built.enter(*BF16)
    built.add()
    built.exit(again)
    first, second, third, none, last = built.noted()
    assert first == third == Modes(True, (BF16,), 1)
    assert second == Modes(True, (BF16, lower), 1)
    assert none is None
    assert last == Modes(True, (BF16,), 2)
    assert (first.casts_once, second.casts_once, Modes(False, ()).casts_once) == (True, False, False)


def test_modes_are_entered_for_one_operator():
    with Modes(False, (BF16,)).entered():
        assert not torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
        assert not torch.is_autocast_cache_enabled()
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")
    with torch.enable_grad(), Modes(True, ()).entered():
        assert torch.is_grad_enabled()


@pytest.mark.parametrize(("wanted", "cached"), [(True, True), (False, False)])
def test_casts_are_cached_where_the_step_asks_for_it(wanted, cached):
    with Modes(True, (("cpu", torch.bfloat16, True, wanted),)).autocast(cached=True):
        assert torch.is_autocast_cache_enabled() is cached


def test_watch_records_the_dtype_of_casts():
    x, y = torch.ones(2), torch.ones(2)
    with CastWatch() as watch:
        x.to(torch.bfloat16)
        y.clone()
    assert watch.casts == {id(x): torch.bfloat16}


def node_with(target, modes):
    graph = fx.Graph()
    node = graph.call_function(target, (graph.placeholder("x"),))
    if modes is not None:
        node.meta["modes"] = modes
    return node


def test_explicit_casts_are_not_autocasts():
    within = Modes(True, (BF16,), 1)
    assert casts_once(node_with(aten.relu.default, within))
    assert not casts_once(node_with(aten.relu.default, None))
    assert not casts_once(node_with(aten._to_copy.default, within))
    assert not casts_once(node_with(aten.relu.default, Modes(False, ())))


def run(built, *inputs):
    return ModalInterpreter(fx.GraphModule({}, built)).run(*inputs)


def test_operators_run_in_their_modes():
    graph = fx.Graph()
    x = graph.placeholder("x")
    plain, frozen = (graph.call_function(aten.mul.Tensor, (x, 2)) for _ in range(2))
    frozen.meta["modes"] = Modes(False, ())
    graph.output((plain, frozen))
    with torch.enable_grad():
        plain, frozen = run(graph, torch.ones(2, requires_grad=True))
    assert (plain.requires_grad, frozen.requires_grad) == (True, False)


def test_parameter_is_cast_once_for_all_operators_of_a_block():
    graph = fx.Graph()
    weight = graph.placeholder("weight")
    views = [graph.call_function(aten.view.default, (weight, [2])) for _ in range(3)]
    for node, block in zip(views, (1, 1, 2), strict=True):
        node.meta |= {"modes": Modes(True, (BF16,), block), CASTS: {"weight": torch.bfloat16}}
    graph.output(tuple(views))
    one, same, other = run(graph, torch.ones(2))
    assert one.dtype == torch.bfloat16
    assert one.data_ptr() == same.data_ptr() != other.data_ptr()
