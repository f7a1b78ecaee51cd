"""The parts of a step's result, and where they stand in its captured graph: loss, weight, metrics, what it prints."""

from collections.abc import Mapping
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor, fx
from torch.export.graph_signature import OutputKind
from torch.utils import _pytree as pytree

from ..errors import RequestError
from .nodes import WITH_PREVIOUS
from .printed import Printed


@frozen
class StepOutputs:
    """Where the parts of the step's result stand in the captured graph.

    Args:
        loss: name of the node that computes the loss.
        weight: name of the node of its weight, a number, or None where the step returns none.
        metrics: name of the node of every metric, or a plain value.
        texts: names of the nodes whose values the step writes into text, by number.
        printed: what it prints and logs for each microbatch.
    """

    loss: str
    weight: str | float | None
    metrics: Mapping[str, Any]
    texts: tuple[str, ...]
    printed: Printed

    @property
    def nodes(self) -> list[str]:
        """Names of all nodes whose values leave the step: loss, weight, metrics, texts."""
        values = [self.loss, self.weight, *self.metrics.values(), *self.texts]
        return [value for value in values if isinstance(value, str)]


def step_outputs(program: Any, printed: Printed) -> StepOutputs:
    """Find the parts of a step's result in the graph that was exported of it.

    Args:
        program: the exported program; it returns the step's result, and tensors that the step wrote into text.
        printed: what the step prints and logs.

    Raises:
        RequestError: the result holds no scalar loss.
    """
    specs = [spec for spec in program.graph_signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    flat = [getattr(spec.arg, "name", None) or getattr(spec.arg, "value", None) for spec in specs]
    result, texts = pytree.tree_unflatten(flat, program.call_spec.out_spec)
    parts = list(result) if isinstance(result, tuple | list) else [result]
    metrics = parts.pop() if len(parts) > 1 and isinstance(parts[-1], dict) else {}
    rule = "return a scalar loss, or (loss, weight), or either followed by a dict of metrics"
    if not parts or len(parts) > 2 or not isinstance(parts[0], str):
        raise RequestError(f"the step returns {type(result).__name__} and no scalar loss: {rule}")
    node = next(n for n in program.graph.nodes if n.name == parts[0])
    value = node.meta["val"]
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.dtype.is_floating_point:
        shape = f"a {value.dtype} tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise RequestError(f"the step returns {shape}, which is no scalar loss: {rule}; reduce it with .mean()")
    return StepOutputs(parts[0], parts[1] if len(parts) == 2 else None, dict(metrics), tuple(texts), printed)


def weight_beside_loss(graph: fx.Graph, outputs: StepOutputs, given: set[str]) -> StepOutputs:
    """Have a weight that the model computes arrive where the loss does: the loss's gradient begins with it.

    Args:
        graph: a captured graph; changed in place.
        outputs: its results.
        given: names of placeholders that every stage has; a weight of these alone is computed where it is needed.
    """
    nodes = {node.name: node for node in graph.nodes}
    weight, loss = nodes.get(str(outputs.weight)), nodes[outputs.loss]
    if weight is None or not _computed(weight, given):
        return outputs
    places = {node: i for i, node in enumerate(graph.nodes)}
    last, end = max(weight, loss, key=lambda node: places[node]), next(reversed(graph.nodes))
    copies = []
    for node in (weight, loss):
        with graph.inserting_after(last):
            last = graph.call_function(torch.ops.aten.clone.default, (node,))
        last.meta = {**node.meta, WITH_PREVIOUS: node is loss}
        end.replace_input_with(node, last)
        copies.append(last.name)
    return evolve(outputs, weight=copies[0], loss=copies[1])


def _computed(node: fx.Node, given: set[str]) -> bool:
    """Whether a node depends on more than some placeholders."""
    todo, seen = [node], {node}
    while todo:
        found = todo.pop()
        if found.op == "placeholder" and found.name not in given:
            return True
        todo += [source for source in found.all_input_nodes if source not in seen]
        seen.update(found.all_input_nodes)
    return False
