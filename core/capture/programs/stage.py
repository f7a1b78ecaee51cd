"""One stage's part of the captured graph, as a separate graph with explicit inputs."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from attrs import evolve, field, frozen
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ...costs.graph import stage_of_nodes
from ..export.operators import Operators, dense_order
from ..graph.nodes import root_of
from ..graph.sizes import Sizes

KEY = "random_key"
"""Name of the input that carries the random key."""

OPERATOR = "operator"
"""Key of a node's metadata: the operator that it belongs to, None for nodes that each stage computes itself."""


@frozen
class Boundary:
    """A tensor that crosses between stages.

    Args:
        name: its node in the captured graph.
        shape, dtype: of the message and its gradient, which are contiguous: in the order that the gradient has in
            memory, or the tensor without one.
        differentiable: whether a gradient is sent back.
        order: dimensions of the tensor in the message's order; () if it is the tensor's.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool
    order: tuple[int, ...] = ()

    def with_sizes(self, sizes: Sizes) -> "Boundary":
        """With numbers in place of symbolic sizes."""
        return evolve(self, shape=sizes.of(self.shape))


@frozen
class StageInputs:
    """The inputs of a stage program, in order.

    Args:
        boundary: tensors of earlier stages.
        parameters, buffers: qualified names.
        constants: placeholder names of constant tensors.
        batch: positions in the flattened batch.
        random: whether the random key follows as the last input.
    """

    boundary: tuple[Boundary, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    constants: tuple[str, ...]
    batch: tuple[int, ...]
    random: bool


@frozen
class StageGraph:
    """A stage's part of the captured graph.

    Args:
        graph: its nodes; placeholders in the order of ``inputs``; returns the tensors of ``outputs``, then ``results``.
        inputs: its inputs.
        outputs: tensors that later stages read.
        results: names of the parts of the step's result that are computed here (loss, weight, metrics).
        first_draw: ordinals of random draws, by node name.
        modules: sub-graphs of higher-order operators.
        fakes: fake tensors for the inputs, in order.
        tangents: for each result of the graph a fake tensor like its gradient; None for one that has none.
        gradients: whether a backward follows; if not, buffers are not written, either.
        held: as of the captured step.
        symbols: that sizes depend on.
        known: traces of parts of the captured step, see `equal_layers`.
    """

    graph: fx.Graph
    inputs: StageInputs
    outputs: tuple[Boundary, ...]
    results: tuple[str, ...]
    first_draw: dict[str, int]
    modules: dict[str, Any]
    fakes: tuple[Tensor, ...]
    tangents: tuple[Tensor | None, ...]
    gradients: bool = True
    held: Sequence[object] = ()
    symbols: Sequence[torch.SymInt] = ()
    known: dict[Any, Any] = field(factory=dict, eq=False, repr=False)


def boundaries(operators: Operators, stages: Sequence[Sequence[str]]) -> dict[tuple[int, int], tuple[Boundary, ...]]:
    """The tensors that each stage sends each other one, in the captured graph's order: the layout of every message.

    Args:
        operators: the captured step's operators.
        stages: names of the operators of each stage.

    Returns:
        (sender, reader) → tensors.
    """
    where = stage_of_nodes(operators.graph, stages)
    stage = {member: where[owner] for member, owner in operators.owner.items()}
    crossing: dict[tuple[int, int], dict[str, Boundary]] = {}
    for node in operators.step.graph.nodes:
        if node.name not in stage:
            continue
        for user in node.users:
            if stage.get(user.name, stage[node.name]) != stage[node.name]:
                message = crossing.setdefault((stage[node.name], stage[user.name]), {})
                message.setdefault(node.name, _boundary(operators, node.name))
    return {pair: tuple(tensors.values()) for pair, tensors in sorted(crossing.items())}


def _boundary(operators: Operators, name: str) -> Boundary:
    value = operators.values[name]
    order = operators.orders.get(name, dense_order(value))
    shape = tuple(value.shape[dim] for dim in order) if order else tuple(value.shape)
    return Boundary(name, shape, value.dtype, bool(value.requires_grad), order)


def stage_graph(
    operators: Operators, stages: Sequence[Sequence[str]], index: int, device: torch.device | None = None
) -> StageGraph:
    """Cut stage ``index`` out of the captured graph.

    Args:
        operators: the captured step's operators.
        stages: names of the operators of each stage.
        index: which stage.
        device: on which the stage will run, of the type that the step was captured for; by default the same one.
    """
    crossing = boundaries(operators, stages)
    step = operators.step
    own = {member for name in stages[index] for member in operators.members[name]}
    # A part of the result that every stage could compute is computed in the loss's stage.
    here = own | operators.local if step.outputs.main_result in own else own
    results = [name for name in dict.fromkeys(step.outputs.nodes) if name in here]
    needed = _with_local(operators, own | set(results))
    read = {source.name for name in needed for source in operators.nodes[name].all_input_nodes}
    incoming = {b.name: b for (_, reader), tensors in crossing.items() if reader == index for b in tensors}
    outgoing = {b.name: b for (sender, _), tensors in crossing.items() if sender == index for b in tensors}

    placeholders = [node for node in step.graph.nodes if node.op == "placeholder" and node.name in read]
    parameters = _placeholders_by_name(placeholders, step.parameters)
    buffers = _placeholders_by_name(placeholders, step.buffers)
    constants = {node.name: [node] for node in placeholders if node.name in step.constants}
    batch = {step.batch[node.name]: [node] for node in placeholders if node.name in step.batch}
    draws = {name: first for name, first in operators.first_draw.items() if name in needed}

    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    fakes: list[Tensor] = []
    for boundary in incoming.values():
        values[operators.nodes[boundary.name]] = graph.placeholder(boundary.name)
        fakes.append(_fake_input(operators, boundary))
    for group in (parameters, buffers, constants, batch):
        for same in group.values():
            placed = graph.placeholder(same[0].name)
            values.update(dict.fromkeys(same, placed))
            fakes.append(operators.values[same[0].name])
    if draws:
        graph.placeholder(KEY)
        with step.fake_mode:
            fakes.append(torch.empty(3, dtype=torch.int64))
    for boundary in incoming.values():
        node, order = operators.nodes[boundary.name], dense_order(operators.values[boundary.name])
        values[node] = _reordered(graph, values[node], boundary.order, back=True)
        if order != boundary.order:  # the result's memory is that of one process, too
            values[node] = _reordered(
                graph, _contiguous(graph, _reordered(graph, values[node], order)), order, back=True
            )
    for node in step.graph.nodes:
        if node.name in needed or node.op == "get_attr":
            values[node] = graph.node_copy(node, lambda n: values[n])
            values[node].meta |= {OPERATOR: operators.owner.get(node.name), "val": operators.values.get(node.name)}
    shown: set[fx.Node] = set()
    outputs = [_sendable(graph, values, operators, boundary, needed, shown) for boundary in outgoing.values()]
    values_of = {name: values[operators.nodes[name]] for name in results}
    # Only the loss starts a backward.
    detached = [
        node if name == step.outputs.main_result else graph.call_function(torch.ops.aten.detach.default, (node,))
        for name, node in values_of.items()
    ]
    graph.output((*outputs, *detached))
    inputs = StageInputs(
        tuple(incoming.values()), tuple(parameters), tuple(buffers), tuple(constants), tuple(batch), bool(draws)
    )
    stage = StageGraph(
        graph, inputs, tuple(outgoing.values()), tuple(results), draws, step.modules, tuple(fakes),
        (*(_tangent(operators, each) for each in outgoing.values()), *(_start(operators, name) for name in results)),
        step.gradients, step.held, () if step.sizes is None else step.sizes.free, operators.traces,
    )  # fmt: skip
    return stage if device is None or device.type == "cpu" else _on_device(operators, stage, device)


def _on_device(operators: Operators, stage: StageGraph, device: torch.device) -> StageGraph:
    """The stage with this device in place of others of its type; its sub-graphs are copied."""
    modules = {name: copy.deepcopy(module) for name, module in stage.modules.items()}
    inner = [m for module in modules.values() for m in module.modules() if isinstance(m, fx.GraphModule)]
    for graph in (stage.graph, *(module.graph for module in inner)):
        set_device(graph, device)
    for module in inner:
        module.recompile()
    for node in stage.graph.nodes:
        if isinstance(node.meta.get("val"), Tensor):
            node.meta["val"] = _fake_on(operators, node.meta["val"], device)
    fakes = tuple(_fake_on(operators, fake, device) for fake in stage.fakes)
    tangents = tuple(None if fake is None else _fake_on(operators, fake, device) for fake in stage.tangents)
    return evolve(stage, modules=modules, fakes=fakes, tangents=tangents)


def _fake_on(operators: Operators, fake: Tensor, device: torch.device) -> Tensor:
    """A fake tensor on another device of its type; one of another type, such as on the host, is unchanged."""
    if fake.device.type != device.type:
        return fake
    with operators.step.fake_mode:
        made = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=device)
    return made.requires_grad_(fake.requires_grad)


def set_device(graph: fx.Graph, device: torch.device) -> None:
    """Replace devices of the same type in the operators' arguments by this one."""
    for node in graph.nodes:
        node.args = with_device(node.args, device)
        node.kwargs = with_device(node.kwargs, device)


def with_device(arguments: Any, device: torch.device) -> Any:
    """Arguments of an operator, with devices of the same type replaced by this one."""
    return pytree.tree_map(lambda v: device if isinstance(v, torch.device) and v.type == device.type else v, arguments)


def _with_local(operators: Operators, own: set[str]) -> set[str]:
    """The stage's nodes and the local ones that they need."""
    needed = set(own)
    for node in reversed(operators.step.graph.nodes):
        if node.name in needed:
            needed.update(source.name for source in node.all_input_nodes if source.name in operators.local)
    return needed


def _placeholders_by_name(placeholders: list[fx.Node], names: dict[str, str]) -> dict[str, list[fx.Node]]:
    found: dict[str, list[fx.Node]] = {}
    for node in placeholders:
        if node.name in names:
            found.setdefault(names[node.name], []).append(node)
    return found


def _fake_input(operators: Operators, boundary: Boundary) -> Tensor:
    with operators.step.fake_mode:
        fake = torch.empty(boundary.shape, dtype=boundary.dtype, device=operators.values[boundary.name].device)
    return fake.requires_grad_(boundary.differentiable)


def _tangent(operators: Operators, boundary: Boundary) -> Tensor | None:
    fake = _fake_input(operators, boundary)
    return fake.detach() if fake.requires_grad else None


def _start(operators: Operators, result: str) -> Tensor | None:
    """The gradient of a part of the result, which only the loss has."""
    step = operators.step
    if result != step.outputs.main_result or not step.gradients:
        return None
    with step.fake_mode:
        return torch.empty_like(operators.values[result]).detach()


def _sendable(
    graph: fx.Graph,
    values: dict[fx.Node, fx.Node],
    operators: Operators,
    boundary: Boundary,
    needed: set[str],
    shown: set[fx.Node],
) -> fx.Node:
    """An output as it is sent: contiguous, so that both ends agree on its layout; detached if no gradient is sent back.

    It shares no storage with another output or an input, because a separate gradient is sent back for each.

    Args:
        needed: names of the nodes of the captured graph that the stage computes.
        shown: nodes whose storage an earlier output shares.
    """
    node, fake = operators.nodes[boundary.name], operators.values[boundary.name]
    root = root_of(node)
    alone = root not in shown and root.name in needed
    shown.add(root)
    value = values[node]
    fake = fake.permute(boundary.order) if boundary.order else fake
    value = _reordered(graph, value, boundary.order)
    if not (alone and fake.is_contiguous()):
        value = _contiguous(graph, value)
    if fake.is_floating_point() and not boundary.differentiable:
        value = graph.call_function(torch.ops.aten.detach.default, (value,))
    return value


def _reordered(graph: fx.Graph, node: fx.Node, order: Sequence[int], back: bool = False) -> fx.Node:
    """A tensor with its dimensions in this order, or back from it; unchanged for ()."""
    if not order:
        return node
    dims = sorted(range(len(order)), key=order.__getitem__) if back else list(order)
    return graph.call_function(torch.ops.aten.permute.default, (node, dims))


def _contiguous(graph: fx.Graph, node: fx.Node) -> fx.Node:
    return graph.call_function(torch.ops.aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
