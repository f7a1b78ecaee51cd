"""Parameters that the loss depends on only through regions, and which of them get a gradient in a microbatch.

    parameter ─▶ … ─▶ input of a region ┄┄ crossing ┄┄▶ result of the region ─▶ … ─▶ loss

A region's Python may use an input in one microbatch and not in another one. In eager PyTorch, a parameter whose paths
all end at inputs that are not used has the gradient None. Stages send each other zeros in place of None, so the paths
are recorded at capture, and each run of a region's backward records its *crossings*: which results depended on which
inputs.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from attrs import field, frozen
from torch import Tensor

from .regions import Region

RegionValue = tuple[int, int]
"""A region, by position in the graph, and one of its results or inputs, by position."""

Crossing = tuple[int, int, int]
"""A region, by position in the graph, one of its results, and one of its inputs."""


@frozen
class GradientReach:
    """What a gradient reaches without passing through a region.

    Args:
        parameters: names.
        results: of regions.
    """

    parameters: frozenset[str] = frozenset()
    results: frozenset[RegionValue] = frozenset()


@frozen
class GradientPaths:
    """The paths of gradients through the regions of a step.

    Args:
        parameters: names of those that the loss depends on only through regions, in order.
        regions: in the order of the graph.
        crossings: all that there may be.
        loss: what the gradient of the loss reaches.
        inputs: input of a region → what its gradient reaches.
    """

    parameters: tuple[str, ...] = ()
    regions: tuple[Region, ...] = ()
    crossings: tuple[Crossing, ...] = ()
    loss: GradientReach = GradientReach()
    inputs: Mapping[RegionValue, GradientReach] = field(factory=dict)

    @classmethod
    def of(cls, loss: Tensor, names: Mapping[int, str], calls: Sequence[tuple[Region, Any]]) -> "GradientPaths":
        """The paths in the graph of autograd.

        Args:
            loss: a scalar with its graph.
            names: identity of a parameter's tensor → its name.
            calls: the regions, each with the node of autograd that its call created.
        """
        number = {call: i for i, (_, call) in enumerate(calls)}

        def reached(start: Any, result: int) -> GradientReach:
            parameters, results = set[str](), set[RegionValue]()
            seen, todo = {(start, result)}, [(start, result)]
            while todo:
                node, at = todo.pop()
                if node in number:
                    results.add((number[node], at))
                    continue
                if (variable := getattr(node, "variable", None)) is not None and id(variable) in names:
                    parameters.add(names[id(variable)])
                for following in node.next_functions:
                    if following[0] is not None and following not in seen:
                        seen.add(following)
                        todo.append(following)
            return GradientReach(frozenset(parameters), frozenset(results))

        first = GradientReach() if loss.grad_fn is None else reached(loss.grad_fn, loss.output_nr)
        inputs = {
            (k, i): reached(*following)
            for k, (_, call) in enumerate(calls)
            for i, following in enumerate(call.next_functions)
            if following[0] is not None
        }
        through = {name for each in inputs.values() for name in each.parameters}
        parameters = tuple(sorted(through - first.parameters))
        if not parameters:
            return cls(loss=first)
        crossings = tuple(
            (k, o, i) for k, (region, _) in enumerate(calls) for o in range(len(region.made))
            for i in region.trained if (k, i) in inputs
        )  # fmt: skip
        return cls(parameters, tuple(region for region, _ in calls), crossings, first, inputs)

    def reached(self, crossed: Collection[Crossing]) -> set[str]:
        """Names of the parameters that get a gradient in a microbatch.

        Args:
            crossed: the crossings that its backward found.
        """
        found = set(self.loss.parameters)
        inputs_of: dict[RegionValue, list[int]] = {}
        for k, o, i in crossed:
            inputs_of.setdefault((k, o), []).append(i)
        seen, todo = set(self.loss.results), [*self.loss.results]
        while todo:
            k, o = todo.pop()
            for i in inputs_of.get((k, o), ()):
                following = self.inputs[k, i]
                found |= following.parameters
                todo += following.results - seen
                seen |= following.results
        return found
