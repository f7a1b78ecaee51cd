"""The joint graph of a stage, forward and backward in one, and its cut into F, B, I and W.

F keeps what the backward reads. B is everything that depends on a gradient that comes in. I is the part of B that the
gradients of the stage's inputs need; W is the rest. The backward of a convolution computes both kinds at once: it
stands in I and W, each with its own half of the output mask. The backward of a normalisation does so, too, and stays in
I whole: its parameters' gradients come with little work, and W would need all it reads and one more gradient.
"""

import contextlib
import operator
from collections.abc import Iterable
from typing import Any

import torch
from attrs import define
from torch import fx
from torch._functorch._aot_autograd import descriptors
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

from ...errors import PanpipeError, RequestError
from ..values.user_lines import line_of, reason_of
from .effects import forward_checks, is_token, remove_tokens
from .stage import StageGraph, StageModule

aten = torch.ops.aten

_MASKED = {aten.convolution_backward.default}
"""Fused backward operators, worth splitting, whose last argument is a mask of the gradients to compute."""


@define
class JointGraph:
    """A stage's joint graph, by the meaning of its inputs and outputs.

    Args:
        graph: the graph.
        primals: placeholders of the stage's inputs, by position.
        tangents: placeholders of incoming gradients, by position of the output they belong to.
        outputs: nodes of the stage's outputs, in order.
        mutations: position of a buffer among the inputs → the node of its new value.
        gradients: position of an input → the node of its gradient, in the order of the inputs.
    """

    graph: fx.Graph
    primals: dict[int, fx.Node]
    tangents: dict[int, fx.Node]
    outputs: list[fx.Node]
    mutations: dict[int, fx.Node]
    gradients: dict[int, fx.Node]


def trace_joint(stage: StageGraph, *, as_on_cpu: bool = True) -> JointGraph:
    """Trace forward and backward of a stage over fake tensors.

    Args:
        stage: the stage.
        as_on_cpu: whether dropout rounds as eager PyTorch does on a CPU, in operators of its own; for costs of another
            device, whose dropout is one kernel, it does not.

    Raises:
        RequestError: an operator of the stage cannot be differentiated or made functional.
    """
    module = StageModule(stage)
    try:
        with contextlib.ExitStack() as stack:
            joint = aot_export_joint_with_descriptors(stack, module, stage.fakes)
            remove_tokens(joint.graph_module.graph)
            if as_on_cpu:
                dropout_as_eager(joint.graph_module.graph)
            return _by_meaning(joint.graph_module.graph)
    except PanpipeError:
        raise
    except Exception as error:
        node = module.running
        what = f"{line_of(node)}: {node.target}" if node is not None else "the backward of a stage"
        raise RequestError(
            f"{what} cannot be turned into forward and backward programs: {reason_of(error)}; use another operator"
        ) from error


def dropout_as_eager(graph: fx.Graph) -> None:
    """Have the backward of dropout round as eager PyTorch does on a CPU, where the mask itself carries the scale.

    The mask stays a byte an element between forward and backward. The product has the strides that the operator was
    traced with, whatever the gradient's are: its readers were traced for these.

    Args:
        graph: a joint graph; changed in place.
    """
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout_backward.default):
        gradient, mask, scale = node.args
        value, wanted = gradient.meta["val"], node.meta["val"]
        if value.device.type != "cpu" or not scale:
            continue
        with graph.inserting_before(node), value.fake_mode:
            scaled = _inserted(graph, node, aten._to_copy.default, mask, dtype=value.dtype)
            scaled = _inserted(graph, node, aten.div.Scalar, scaled, 1 / scale)
            product = _inserted(graph, node, aten.mul.Tensor, gradient, scaled)
            if product.meta["val"].stride() != wanted.stride():
                # Where operands disagree, a product has the strides of the first; where those of neither are wanted,
                # the program restrides it.
                product.args = (scaled, gradient)
                product.meta["val"] = wanted
        node.replace_all_uses_with(product)
        graph.erase_node(node)


def _inserted(graph: fx.Graph, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call with its fake result, in the place and with the notes of another node."""
    made = graph.call_function(target, args, kwargs)
    values = fx.map_arg(args, lambda node: node.meta["val"])
    made.meta = {**like.meta, "val": target(*values, **kwargs)}
    return made


def _by_meaning(graph: fx.Graph) -> JointGraph:
    joint = JointGraph(graph, {}, {}, [], {}, {})
    for node in graph.nodes:
        if node.op != "placeholder":
            continue
        meaning = node.meta["desc"]
        if isinstance(meaning, descriptors.PlainAOTInput):
            joint.primals[meaning.idx] = node
        elif isinstance(meaning, descriptors.TangentAOTInput) and isinstance(
            meaning.output, descriptors.PlainAOTOutput
        ):
            joint.tangents[meaning.output.idx] = node
        elif not is_token(meaning):
            raise RuntimeError(f"an input of an unexpected kind: {meaning}")
    output = next(node for node in graph.nodes if node.op == "output")
    found: dict[int, fx.Node] = {}
    for node, meaning in zip(output.args[0], output.meta["desc"], strict=True):
        if node is None:
            continue
        if isinstance(meaning, descriptors.PlainAOTOutput):
            found[meaning.idx] = node
        elif isinstance(meaning, descriptors.InputMutationAOTOutput):
            joint.mutations[meaning.mutated_input.idx] = node  # type: ignore[attr-defined]
        elif isinstance(meaning, descriptors.GradAOTOutput):
            joint.gradients[meaning.grad_of.idx] = node  # type: ignore[attr-defined]
        elif not is_token(meaning):
            raise RuntimeError(f"an output of an unexpected kind: {meaning}")
    joint.outputs = [found[i] for i in sorted(found)]
    joint.gradients = dict(sorted(joint.gradients.items()))
    return joint


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes and everything that they depend on, placeholders left out."""
    found: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found and node.op != "placeholder":
            found.add(node)
            todo.extend(node.all_input_nodes)
    return found


def forward_nodes(joint: JointGraph) -> set[fx.Node]:
    """The nodes of F: what outputs and new values of buffers depend on, and the forward's error checks.

    Of an operator with several results F picks all, so that the backward keeps those that it reads and no others.
    """
    found = ancestors([*joint.outputs, *joint.mutations.values(), *forward_checks(joint.graph)])
    return found | {user for node in found for user in node.users if user.target is operator.getitem}


def split_masked(graph: fx.Graph, for_inputs: set[fx.Node]) -> None:
    """Give fused backward operators that serve both I and W one copy for each, masks complementary.

    Args:
        graph: the joint graph; changed in place.
        for_inputs: nodes that the input gradients depend on.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _MASKED or node not in for_inputs:
            continue
        parts = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        mask = list(node.args[-1])
        rest = [i for i, user in parts.items() if mask[i] and user not in for_inputs]
        if not rest:
            continue
        with graph.inserting_after(node):
            twin = graph.node_copy(node)
        twin.args = (*node.args[:-1], [i in rest for i in range(len(mask))])
        node.args = (*node.args[:-1], [mask[i] and i not in rest for i in range(len(mask))])
        for i in rest:
            parts[i].args = (twin, i)


def at_hand(gradient: fx.Node, computed: set[fx.Node]) -> set[fx.Node] | None:
    """The nodes that pick a gradient from what is computed, or None where there is more to do than to pick."""
    picked = ancestors([gradient]) - computed
    return picked if all(node.target is operator.getitem for node in picked) else None


def closed_over(nodes: Iterable[fx.Node], inside: set[fx.Node]) -> list[fx.Node]:
    """What nodes read from outside a set, in order of first reading."""
    return list(dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside))


def ordered(graph: fx.Graph, nodes: set[fx.Node]) -> list[fx.Node]:
    """Nodes in the graph's order."""
    return [node for node in graph.nodes if node in nodes]
