"""The results of a captured function, and their nodes in its graph.

A training step returns loss, weight and metrics. A function that is only run forward returns any nesting of
tensors with a row for each sample.
"""

from collections.abc import Mapping
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor, fx
from torch.export.graph_signature import OutputKind
from torch.utils import _pytree as pytree

from ...errors import RequestError
from ..values.user_lines import message_start
from .nodes import WITH_PREVIOUS, ancestors


@frozen
class StepOutputs:
    """The nodes of the parts of the step's result.

    Args:
        loss: name of the node that computes the loss.
        weight: name of the node of its weight, a number, or None if the step returns none.
        metrics: name of the node of every metric, or a plain value.
    """

    loss: str
    weight: str | float | None
    metrics: Mapping[str, Any]

    @property
    def nodes(self) -> list[str]:
        """Names of all nodes whose values leave the step: loss, weight, metrics."""
        values = [self.loss, self.weight, *self.metrics.values()]
        return [value for value in values if isinstance(value, str)]

    @property
    def main_result(self) -> str:
        """Name of the loss's node; results that every stage could compute are computed in its stage."""
        return self.loss


@frozen
class RowOutputs:
    """The nodes of the results of a function that is only run forward.

    Args:
        values: name of the node of every tensor, in order; None if the function returns None there.
        dims: of each the dimension that has a row for each sample.
        nesting: of these.
        main_result: name of the node of the last one; results that every stage could compute are computed in its stage.
    """

    values: tuple[str | None, ...]
    dims: tuple[int, ...]
    nesting: pytree.TreeSpec
    main_result: str

    @property
    def nodes(self) -> list[str]:
        """Names of all nodes whose values leave the function."""
        return [value for value in self.values if isinstance(value, str)]


Outputs = StepOutputs | RowOutputs


def parts_in_words(outputs: Outputs) -> str:
    """The parts of a step's result, as text for messages."""
    if isinstance(outputs, RowOutputs):
        marks = [None if value is None else "tensor" for value in outputs.values]
        return str(pytree.tree_unflatten(marks, outputs.nesting)).replace("'tensor'", "tensor")
    weight = "" if outputs.weight is None else ", a weight"
    return f"a loss{weight}" + "".join(f", '{name}'" for name in outputs.metrics)


def step_outputs(program: Any, line: str = "") -> StepOutputs:
    """Find the parts of a step's result in its exported graph.

    Args:
        program: the exported program.
        line: where the step begins, for messages.

    Raises:
        RequestError: the result has no scalar loss, or a weight that is no scalar.
    """
    result = _returned(program)
    parts = list(result) if isinstance(result, tuple | list) else [result]
    metrics = parts.pop() if len(parts) > 1 and isinstance(parts[-1], dict) else {}
    rule = "return a scalar loss, or (loss, weight), either followed by a dict of metrics, or an object with a loss"
    who = f"{message_start(line)}the step"
    if not parts or len(parts) > 2 or not isinstance(parts[0], str):
        raise RequestError(f"{who} returns {type(result).__name__} and not a scalar loss: {rule}")
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    value, weight = values[parts[0]], values.get(parts[1]) if len(parts) == 2 else None
    if isinstance(weight, Tensor) and weight.numel() != 1:
        raise RequestError(
            f"{who} returns a tensor of shape {tuple(weight.shape)} after the loss, where the weight of the loss is "
            "expected, a scalar: return other results in a dict, (loss, {'logits': logits}), or the loss alone"
        )
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.dtype.is_floating_point:
        shape = f"a {value.dtype} tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise RequestError(f"{who} returns {shape}, which is not a scalar loss: {rule}; reduce it with .mean()")
    return StepOutputs(parts[0], parts[1] if len(parts) == 2 else None, dict(metrics))


@frozen
class ResultRows:
    """What is known of the results of a function that is only run forward.

    Args:
        samples: how many samples a microbatch has.
        dims: of every tensor in order those dimensions that have a row for each of them; None if dimension 0 of all.
    """

    samples: int
    dims: tuple[tuple[int, ...], ...] | None = None

    def of(self, number: int, value: Tensor) -> int | None:
        """The dimension of a result's rows; None if there is none, or more than one."""
        dims = (0,) if self.dims is None else self.dims[number] if number < len(self.dims) else ()
        right = len(dims) == 1 and dims[0] < value.ndim and value.shape[dims[0]] == self.samples
        return dims[0] if right else None


def row_outputs(program: Any, rows: ResultRows) -> RowOutputs:
    """Find the results of a function that is only run forward.

    Args:
        program: the exported program; its graph is changed in place.
        rows: what its results have.

    Raises:
        RequestError: it returns something that does not have a row for each sample, or no tensor at all.
    """
    result = _returned(program)
    leaves, nesting = pytree.tree_flatten(result)
    nodes = {node.name: node for node in program.graph.nodes}
    end = program.graph.output_node()
    values: list[str | None] = []
    dims: list[int] = []
    tensors = 0
    for leaf in leaves:
        node = nodes.get(leaf) if isinstance(leaf, str) else None
        value = None if node is None else node.meta["val"]
        dim = rows.of(tensors, value) if isinstance(value, Tensor) else None
        tensors += isinstance(value, Tensor)
        dims.append(dim or 0)
        if leaf is not None and dim is None:
            raise RequestError(
                f"the function returns {_described(leaf, value)} for {rows.samples} samples: what is joined over "
                "microbatches needs a row for each sample along one dimension; return tensors of a batch, and reduce "
                "them afterwards"
            )
        if node is not None and node.op == "placeholder":  # a result must be computed by a node
            with program.graph.inserting_before(end):
                copy = program.graph.call_function(torch.ops.aten.clone.default, (node,))
            copy.meta = dict(node.meta)
            end.args = ((*end.args[0], copy),)
            node = copy
        values.append(None if node is None else node.name)
    named = {name for name in values if name is not None}
    if not named:
        raise RequestError("the function returns no tensor: return the results to join, such as model(batch['x'])")
    main_result = next(node.name for node in reversed(program.graph.nodes) if node.name in named)
    return RowOutputs(tuple(values), tuple(dims), nesting, main_result)


def _returned(program: Any) -> Any:
    """What an exported function returned, with names of nodes."""
    given = zip(program.graph_signature.output_specs, program.graph.output_node().args[0], strict=False)
    flat = [getattr(value, "name", value) for spec, value in given if spec.kind is OutputKind.USER_OUTPUT]
    return pytree.tree_unflatten(flat, program.call_spec.out_spec)


def _described(leaf: Any, value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"{leaf!r}" if value is None else f"{value!r}"
    return f"a tensor of shape {tuple(value.shape)}" if value.ndim else "a scalar"


def keep_weight_with_loss(graph: fx.Graph, outputs: StepOutputs, given: set[str]) -> StepOutputs:
    """Compute a weight that depends on the model in the loss's stage, because the loss's gradient starts from it.

    Args:
        graph: a captured graph; changed in place.
        outputs: its results.
        given: names of placeholders that every stage has; a weight of these alone is computed where it is needed.
    """
    nodes = {node.name: node for node in graph.nodes}
    weight, loss = nodes.get(str(outputs.weight)), nodes[outputs.loss]
    if weight is None:
        return outputs
    read = {weight}.union(*(node.all_input_nodes for node in ancestors([weight])))
    if given.issuperset(node.name for node in read if node.op == "placeholder"):
        return outputs
    places = {node: i for i, node in enumerate(graph.nodes)}
    last, end = max(weight, loss, key=lambda node: places[node]), graph.output_node()
    copies = []
    for node in (weight, loss):
        with graph.inserting_after(last):
            last = graph.call_function(torch.ops.aten.clone.default, (node,))
        last.meta = {**node.meta, WITH_PREVIOUS: node is loss}
        end.replace_input_with(node, last)
        copies.append(last.name)
    return evolve(outputs, weight=copies[0], loss=copies[1])
