"""Shared tensors of a stage: computed once a step, from parameters and constants alone, for all microbatches.

Under autocast F casts every weight, and the backward reads the cast: without sharing, every microbatch in flight would
hold its own copy of all weights. The same holds for parametrizations, weight norm, masks and views such as
``weight.t()``. All microbatches of a step read one set of shared tensors:

    parameters, constants ──shared program, before the first F──▶ shared tensors ──▶ F, RECOMPUTE, B, I, W of all
                                                                        └─ freed after the stage's last backward

Not shared are random draws, what depends on a buffer that the stage writes, Python regions, and what F or a backward
returns, because messages own their tensors. What depends on no parameter, such as a causal mask, is shared if the
backward reads it. What only the backward computes is shared if it is a view; otherwise its memory, which one operator
needs, would be held for the whole step.
"""

import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from attrs import frozen
from torch import Tensor, fx

from ..graph.nodes import always_views, ancestors, fixed_nodes
from ..regions.regions import runs_region
from .generated_code import Program, compile_program
from .joint_graph import JointGraph, closed_over, ordered
from .stage import StageInputs


@frozen
class Shared:
    """The program of a stage's shared tensors.

    Args:
        run: takes the stage's parameters, buffers and constants, in order; returns the shared tensors.
        count: number of shared tensors.
        key: equal for programs that compute the same from inputs of the same names, such as those of another shape of
            microbatch. Constants of one name may differ, for example numbers of the batch.
        reads: positions of the inputs that it reads.
    """

    run: Program
    count: int
    key: str
    reads: tuple[int, ...]


def shared_nodes(joint: JointGraph, inputs: StageInputs, in_forward: Collection[fx.Node]) -> list[fx.Node]:
    """The nodes of a joint graph that all microbatches share, in order.

    Args:
        joint: forward and backward of a stage.
        inputs: of the stage.
        in_forward: the nodes of F.
    """
    given, start = _fixed_inputs(joint, inputs), len(inputs.boundary)
    fixed = fixed_nodes(joint.graph, given, {joint.primals[start + i] for i in range(len(inputs.parameters))})
    backward = ancestors(joint.gradients.values()).difference(in_forward)
    read = set(closed_over(ordered(joint.graph, backward), backward)).union(joint.gradients.values())
    wanted = ancestors(node for node, trained in fixed.items() if node in in_forward and (trained or node in read))
    owned = _shown_by([*joint.outputs, *joint.mutations.values(), *joint.gradients.values()])
    found: dict[fx.Node, None] = {}
    for node in fixed:
        known = all(source in found or source in given for source in node.all_input_nodes)
        if known and node not in owned and (node in wanted or (node in backward and _is_view(node))):
            found[node] = None
    for node in reversed(list(found)):  # what only returned tensors are computed from is returned, too
        if all(user in fixed and user not in found for user in node.users):
            del found[node]
    _drop_divided(found)
    return list(found)


def _drop_divided(found: dict[fx.Node, None]) -> None:
    """Drop operators with several results, such as a split, of which some are not shared, and what reads them: only
    tensors are handed from the shared program to others."""
    dropped = True
    while dropped:
        divided = {
            node for node in found
            if not isinstance(node.meta["val"], Tensor) and any(user not in found for user in node.users)
        }  # fmt: skip
        dropped = bool(divided)
        for node in list(found):
            if node in divided or not divided.isdisjoint(node.all_input_nodes):
                divided.add(node)
                del found[node]


def shared_values(nodes: Collection[fx.Node]) -> list[fx.Node]:
    """The shared nodes that other nodes read, in order."""
    inside = set(nodes)
    return [node for node in nodes if isinstance(node.meta["val"], Tensor) and not inside.issuperset(node.users)]


def shared_program(joint: JointGraph, inputs: StageInputs, nodes: Sequence[fx.Node]) -> Shared | None:
    """The program of shared nodes; None without any.

    Args:
        joint: forward and backward of a stage.
        inputs: of the stage.
        nodes: from `shared_nodes`.
    """
    values = shared_values(nodes)
    if not values:
        return None
    start = len(inputs.boundary)
    names = [*inputs.parameters, *inputs.buffers, *inputs.constants]
    given = [joint.primals[start + i] for i in range(len(names))]
    read = {source for node in nodes for source in node.all_input_nodes}
    reads = tuple(i for i, node in enumerate(given) if node in read)
    return Shared(compile_program(nodes, given, values, {}), len(values), _key(nodes, values, given, names), reads)


def _fixed_inputs(joint: JointGraph, inputs: StageInputs) -> dict[fx.Node, None]:
    """Placeholders of parameters, buffers and constants that no microbatch changes."""
    start = len(inputs.boundary)
    end = start + len(inputs.parameters)
    positions = [*range(start, end)]
    buffers, constants = range(end, end + len(inputs.buffers)), end + len(inputs.buffers)
    if not any(runs_region(node) for node in joint.graph.nodes):  # Python may write buffers
        positions += buffers
    positions += range(constants, constants + len(inputs.constants))
    return dict.fromkeys(joint.primals[i] for i in positions if i not in joint.mutations)


def _is_view(node: fx.Node) -> bool:
    return node.target is operator.getitem or always_views(node.target)


def _shown_by(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes, and those whose memory they show."""
    found: set[fx.Node] = set()
    for last in nodes:
        node: Any = last
        while node not in found:
            found.add(node)
            if node.op != "call_function" or not _is_view(node):
                break
            node = node.args[0]
    return found


def _key(nodes: Sequence[fx.Node], values: Sequence[fx.Node], given: Sequence[fx.Node], names: Sequence[str]) -> str:
    called = {node: f"input {name}" for node, name in zip(given, names, strict=True)}
    called |= {node: f"node {i}" for i, node in enumerate(nodes)}
    lines = [str((str(n.target), fx.map_arg((n.args, n.kwargs), lambda s: called[s]))) for n in nodes]
    return "\n".join([*lines, str([called[value] for value in values])])
