"""One operator of a captured step by itself: its inputs, its results, and a key that is equal for equal work."""

from collections.abc import Hashable
from functools import cached_property

import torch
from attrs import frozen
from torch import Tensor, fx

from ..capture.export.operators import Operators
from ..capture.graph.nodes import root_of
from ..capture.programs.equal_layers import work_key
from ..capture.programs.stage import KEY, StageGraph, StageInputs
from .attention import with_fused_attention

aten = torch.ops.aten
_CASTS = (aten._to_copy.default, aten.to.dtype, aten.to.dtype_layout, aten.to.device)
"""Operators of a captured step that cast."""


@frozen(slots=False, eq=False)
class LoneOperator:
    """An operator on its own.

    Args:
        operators: the captured step.
        name: of the operator.
    """

    operators: Operators
    name: str

    @cached_property
    def members(self) -> list[fx.Node]:
        """Its nodes of the captured graph, in order."""
        return [self.operators.nodes[name] for name in self.operators.members[self.name]]

    @cached_property
    def given(self) -> list[fx.Node]:
        """Its inputs: results of other operators first, then parameters, buffers, constants and the batch."""
        inside = set(self.members)
        read = dict.fromkeys(s for node in self.members for s in node.all_input_nodes if s not in inside)
        tensors = [node for node in read if isinstance(self.operators.values.get(node.name), Tensor)]
        return sorted(tensors, key=lambda node: node.name not in self.operators.owner)

    @cached_property
    def activations(self) -> list[fx.Node]:
        """Its inputs from other operators."""
        return [node for node in self.given if node.name in self.operators.owner]

    @cached_property
    def fixed(self) -> list[bool]:
        """For each input whether it depends on parameters, constants and buffers alone."""
        operators, step = self.operators, self.operators.step
        inputs = {*step.parameters, *step.buffers, *step.constants, *operators.fixed}
        return [node.name in inputs for node in self.given]

    @cached_property
    def returned(self) -> list[fx.Node]:
        """Members that other operators read, or that the step returns."""
        inside, results = set(self.members), set(self.operators.step.outputs.nodes)
        return [
            node for node in self.members
            if isinstance(self.operators.values[node.name], Tensor)
            and (node.name in results or any(user not in inside and user.op != "output" for user in node.users))
        ]  # fmt: skip

    @cached_property
    def key(self) -> Hashable:
        """Equal for operators that do the same work, at any position."""
        values, roots = self.operators.values, dict[fx.Node, int]()
        kinds = tuple((self._kind(n), roots.setdefault(root_of(n), len(roots))) for n in self.given)
        own = work_key(
            self.members, self.given, self.returned, lambda n: values.get(n.name), self.operators.first_draw
        )  # fmt: skip
        return own, kinds

    def _kind(self, node: fx.Node) -> str:
        step = self.operators.step
        if node.name in self.operators.owner:
            return "fixed" if node.name in self.operators.fixed else "activation"
        return "parameter" if node.name in step.parameters else "other"

    def graph(self) -> StageGraph:
        """The operator as a stage, with fused attention.

        Every result is a copy, so that each has a separate gradient; see `is_copy`.
        """
        operators, step = self.operators, self.operators.step
        graph = fx.Graph()
        values: dict[fx.Node, fx.Node] = {}
        for node in self.given:
            values[node] = graph.placeholder(node.name)
        draws = {n.name: operators.first_draw[n.name] for n in self.members if n.name in operators.first_draw}
        with step.fake_mode:
            fakes = [_empty_like(operators.values[node.name]) for node in self.given]
            if draws:
                graph.placeholder(KEY)
                fakes.append(torch.empty(3, dtype=torch.int64))
        read = {s for node in self.members for s in node.all_input_nodes}
        for node in step.graph.nodes if any(s.op == "get_attr" for s in read) else ():
            if node.op == "get_attr" and node in read:
                values[node] = graph.node_copy(node)
        for node in self.members:
            values[node] = graph.node_copy(node, lambda n: values.get(n, operators.values.get(n.name)))
        graph.output(tuple(self._copied(graph, values[node], node) for node in self.returned))
        with_fused_attention(graph)
        inputs = StageInputs((), (), (), (), (), bool(draws))
        with step.fake_mode:
            results = [operators.values[node.name] for node in self.returned]
            tangents = tuple(torch.empty_like(value).detach() if value.requires_grad else None for value in results)
        return StageGraph(graph, inputs, (), (), draws, step.modules, tuple(fakes), tangents, held=step.held)

    def _copied(self, graph: fx.Graph, made: fx.Node, node: fx.Node) -> fx.Node:
        if not self.operators.values[node.name].requires_grad:
            made = graph.call_function(aten.detach.default, (made,))
        return graph.call_function(aten.clone.default, (made,))


def is_copy(node: fx.Node) -> bool:
    """Whether an output of the traced graph is a copy that `LoneOperator.graph` added."""
    return node.target is aten.clone.default


def narrowed(operator: LoneOperator, node: fx.Node | None) -> fx.Node | None:
    """What a node of the captured step is a cast of to a narrower dtype; None if it is no such cast."""
    if node is None or node.target not in _CASTS:
        return None
    source = node.all_input_nodes[0]
    values = [operator.operators.values[each.name] for each in (node, source)]
    return source if all(v.is_floating_point() for v in values) and values[0].itemsize < values[1].itemsize else None


def _empty_like(value: Tensor) -> Tensor:
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return made.requires_grad_(value.requires_grad)
