"""Nodes of graphs that are made by hand: small square matrices and what operators make of them."""

from typing import Any

import torch
from torch import Tensor, fx

SIDE = 4


class Taken:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.values: dict[int, Tensor] = {}
        self.products = self.sections = 0

    def add(self, number: int, value: Any) -> None:
        self.values[number] = value.clone()

    def add_product(self, number: int, left: Tensor, right: Tensor) -> None:
        self.values[number] = left.mm(right)
        self.products += 1

    def totals(self, numbers: tuple[int, ...]) -> list[Tensor]:
        found = [torch.zeros(SIDE, SIDE, dtype=torch.float64) for _ in numbers]
        self.values |= dict(zip(numbers, found, strict=True))
        return found

    def added(self, numbers: tuple[int, ...]) -> None:
        self.sections += 1


def node(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    made = graph.call_function(target, args, kwargs)
    values = [a.meta["val"] if isinstance(a, fx.Node) else a for a in args]
    made.meta["val"] = target(*values, **kwargs)
    return made


def placeholder(graph: fx.Graph, name: str, dtype: torch.dtype = torch.float64) -> fx.Node:
    made = graph.placeholder(name)
    made.meta["val"] = torch.randn(SIDE, SIDE, dtype=dtype)
    return made
