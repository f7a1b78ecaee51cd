"""Operators that write over an operand: the one that was made last, and only where nothing needs it any more."""

import pytest
import torch
from panpipe.core.capture.programs.overwriting import may_overwrite, overwriting
from torch import fx

from ....support.nodes import SIDE, node, placeholder

aten = torch.ops.aten


def test_sum_overwrites_its_most_recent_operand() -> None:
    graph = fx.Graph()
    x, y = placeholder(graph, "x"), placeholder(graph, "y")
    one = node(graph, aten.mm.default, x, y)
    other = node(graph, aten.mm.default, y, x)
    total = node(graph, aten.add.Tensor, one, other)
    assert overwriting([one, other, total], {total}) == {total: (aten.add.out, "out", other)}


@pytest.mark.parametrize("reason", ["an input", "read later", "a view is read later", "kept", "a view is kept", "both"])
def test_value_that_is_still_needed_is_not_overwritten(reason: str) -> None:
    graph = fx.Graph()
    x, y = placeholder(graph, "x"), placeholder(graph, "y")
    made = x if reason == "an input" else node(graph, aten.mm.default, x, y)
    view = node(graph, aten.t.default, made)
    total = node(graph, aten.add.Tensor, made, view if reason == "both" else y)
    nodes = [one for one in (made, view, total) if one is not x]
    kept: set[fx.Node] = {total}
    if reason == "read later":
        nodes.append(node(graph, aten.relu.default, made))
    elif reason == "a view is read later":
        nodes.append(node(graph, aten.relu.default, view))
    elif reason == "kept":
        kept.add(made)
    elif reason == "a view is kept":
        kept.add(view)
    assert not overwriting(nodes, kept)


def test_an_operand_of_another_layout_is_not_overwritten() -> None:
    graph = fx.Graph()
    x, y = placeholder(graph, "x"), placeholder(graph, "y")
    product = node(graph, aten.mm.default, x, y)
    turned = node(graph, aten.t.default, product)
    assert not overwriting([product, turned, node(graph, aten.add.Tensor, turned, y)], set())
    row = node(graph, aten.mm.default, x, y)
    row.meta["val"] = torch.empty(1, SIDE, dtype=torch.float64)
    assert not overwriting([row, node(graph, aten.add.Tensor, row, y)], set())


def test_memory_that_was_overwritten_once_is_overwritten_again() -> None:
    graph = fx.Graph()
    x, y = placeholder(graph, "x"), placeholder(graph, "y")
    product = node(graph, aten.mm.default, x, y)
    first = node(graph, aten.add.Tensor, product, x)
    second = node(graph, aten.mul.Tensor, first, y)
    assert overwriting([product, first, second], {second}) == {
        first: (aten.add.out, "out", product), second: (aten.mul.out, "out", first),
    }  # fmt: skip
    assert second not in overwriting([product, first, second], {second, first})


def test_nothing_is_overwritten_inside_of_something_else_or_in_unknown_memory() -> None:
    graph = fx.Graph()
    x, y = placeholder(graph, "x"), placeholder(graph, "y")
    product = node(graph, aten.mm.default, x, y)
    total = node(graph, aten.add.Tensor, product, y)
    assert not overwriting([product, total], {total}, {total})
    same = node(graph, aten.alias.default, x)
    assert not overwriting([same, node(graph, aten.add.Tensor, same, y)], set())
    maybe = node(graph, aten.contiguous.default, product)  # it may be the product itself
    total, later = node(graph, aten.add.Tensor, product, y), node(graph, aten.relu.default, maybe)
    assert not overwriting([product, maybe, total, later], set())


def test_result_of_another_type_is_not_written_over_its_operand() -> None:
    graph = fx.Graph()
    x, y = placeholder(graph, "x", torch.float32), placeholder(graph, "y")
    assert not may_overwrite(node(graph, aten.add.Tensor, x, y), x)
    assert may_overwrite(node(graph, aten.add.Tensor, x, y), y)
    assert not may_overwrite(node(graph, aten.mm.default, y, y), y)
