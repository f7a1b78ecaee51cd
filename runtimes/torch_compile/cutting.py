"""Cuts a graph of Dynamo into stages: where a cut is allowed, which cut is balanced, and the stages as graphs.

Where a graph has activation checkpoints, the recomputation draws the same random numbers as the forward. Dynamo
represents ``torch.utils.checkpoint`` by a higher-order operator. Unchanged, it would recompute its body outside of the
mode that keys random numbers, and dropout would drop other elements than in the forward.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import fx
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from ...core.capture.graph.randomness import KeyedRandom
from ...core.cluster.catalog import find_device
from ...core.search.suggestions.regular_cuts import partition_chain
from .samples import NodeInfo, tensors_of

_OPENING = ("_enter_autocast", "_vmap_increment_nesting", "_grad_increment_nesting", "_saved_tensors_hooks_disable")
_CLOSING = ("_exit_autocast", "_vmap_decrement_nesting", "_grad_decrement_nesting", "_saved_tensors_hooks_enable")


@frozen(eq=False)
class Stage:
    """A part of the graph.

    Args:
        module: takes the arguments, then the tensors of earlier stages; returns a tuple.
        arguments: positions of the graph's arguments that it reads.
        incoming: nodes of earlier stages that it reads, all tensors.
        outgoing: nodes that it returns, for later stages or as outputs of the graph.
        first_draw: ordinal of its first random operator in the whole graph.
    """

    module: fx.GraphModule
    arguments: tuple[int, ...]
    incoming: tuple[fx.Node, ...]
    outgoing: tuple[fx.Node, ...]
    first_draw: int


def cut(graph: fx.GraphModule, info: Mapping[fx.Node, NodeInfo], stages: int) -> list[Stage]:
    """Cut a graph into stages of about equal cost, in the order of its nodes.

    Args:
        stages: number of stages; there are fewer if the graph has too few places to cut.
    """
    nodes = [node for node in graph.graph.nodes if node.op not in ("placeholder", "output")]
    costs = [_cost(info[node]) for node in nodes]
    allowed = [place for place in range(1, len(nodes)) if place not in _forbidden(graph, nodes, info)]
    places = _even(costs, allowed, stages)
    bounds = [0, *places, len(nodes)]
    return _stages(graph, info, [nodes[a:b] for a, b in pairwise(bounds)])


def _cost(info: NodeInfo) -> float:
    """Seconds on a core at its peak rates; only the ratios matter."""
    core = find_device("cpu-core")
    return info.flops / core.peak_flops_per_s["fp32"] + 2 * info.bytes / core.peak_memory_bytes_per_s


def _forbidden(graph: fx.GraphModule, nodes: Sequence[fx.Node], info: Mapping[fx.Node, NodeInfo]) -> set[int]:
    """Places before which no stage may begin.

    They are inside a context such as autocast; between an operator with several results and the nodes that select one,
    because a message is a tensor; and between the first and the last use of a tensor that is written in place.
    """
    found: set[int] = set()
    depth, gradients = 0, True
    uses: dict[int, list[int]] = {}
    written: set[int] = set()
    position = {node: place for place, node in enumerate(nodes)}
    for place, node in enumerate(nodes):
        if depth or not gradients:
            found.add(place)
        if info[node].several:
            found.update(range(place + 1, max((position.get(user, place) for user in node.users), default=place) + 1))
        name = getattr(node.target, "__name__", str(node.target))
        depth += (name in _OPENING) - (name in _CLOSING)
        if node.target is torch._C._set_grad_enabled:
            gradients = bool(node.args[0])
        written |= info[node].written
        for one in (node, *node.all_input_nodes):
            if info[one].tensor:
                uses.setdefault(info[one].storage, []).append(place)
    # Later stages read a written tensor as it is at the end of its stage: only writes must stay with earlier uses.
    arguments = {info[node].storage for node in graph.graph.nodes if node.op == "placeholder" and info[node].tensor}
    for storage in written:
        places = uses.get(storage, [])
        writes = [place for place in places if storage in info[nodes[place]].written]
        if writes:
            found.update(range(places[0] + 1, (places[-1] if storage in arguments else writes[-1]) + 1))
    return found


def _even(costs: Sequence[float], allowed: Sequence[int], stages: int) -> list[int]:
    """The places for which the most expensive stage is cheapest."""
    ends = np.array([*allowed, len(costs)])
    before, starts = np.concatenate(([0.0], np.cumsum(costs))), np.concatenate(([0], ends))
    cost = np.where(starts[:, None] < ends[None, :], before[ends][None, :] - before[starts][:, None], np.inf)
    _, places = partition_chain(cost, min(stages, len(ends)), np.maximum)
    return [int(ends[place]) for place in places[:-1]]


def _stages(graph: fx.GraphModule, info: Mapping[fx.Node, NodeInfo], parts: Sequence[Sequence[fx.Node]]) -> list[Stage]:
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    arguments = [node for node in graph.graph.nodes if node.op == "placeholder"]
    home = {node: number for number, part in enumerate(parts) for node in part}
    given = {node for node in tensors_of(output) if isinstance(node, fx.Node) and node in home}
    drafts = [_draft(part, number, home, info) for number, part in enumerate(parts)]
    stages, draws = [], 0
    for number, (part, (copied, incoming)) in enumerate(zip(parts, drafts, strict=True)):
        read = {node for _, others in drafts[number + 1 :] for node in others}
        outgoing = tuple(node for node in part if node in read or node in given)
        wanted = [place for place, node in enumerate(arguments) if any(node in n.all_input_nodes for n in copied)]
        module = _module(graph, copied, [arguments[place] for place in wanted], incoming, outgoing)
        stages.append(Stage(module, tuple(wanted), incoming, outgoing, draws))
        draws += sum(info[node].draws for node in part)
    return stages


def _draft(
    part: Sequence[fx.Node], number: int, home: Mapping[fx.Node, int], info: Mapping[fx.Node, NodeInfo]
) -> tuple[list[fx.Node], tuple[fx.Node, ...]]:
    """The nodes of a stage, with copies of the numbers and attributes of earlier stages that it reads; and the tensors
    of earlier stages that it reads."""
    copied: dict[fx.Node, None] = {}
    incoming: dict[fx.Node, None] = {}

    def want(node: fx.Node) -> None:
        for one in node.all_input_nodes:
            if one not in home or home[one] == number or one in copied:
                continue
            if info[one].tensor and one.op != "get_attr":
                incoming[one] = None
            else:
                want(one)
                copied[one] = None

    for node in part:
        want(node)
        copied[node] = None
    return list(copied), tuple(incoming)


def _module(
    graph: fx.GraphModule,
    nodes: Sequence[fx.Node],
    arguments: Sequence[fx.Node],
    incoming: Sequence[fx.Node],
    outgoing: Sequence[fx.Node],
) -> fx.GraphModule:
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {node: made.placeholder(node.name) for node in (*arguments, *incoming)}
    copy: Callable[[Any], fx.Node] = copies.__getitem__
    for node in nodes:
        copies[node] = made.node_copy(node, copy)
        if node.target is CHECKPOINT:
            copies[node].target = checkpointed
    made.output(tuple(copies[node] for node in outgoing))
    return fx.GraphModule(graph, made)


CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
"""Dynamo's operator, which `checkpointed` replaces."""

_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def checkpointed(body: fx.GraphModule, *arguments: Any, **options: Any) -> Any:
    """Run a body whose saved tensors are recomputed in the backward.

    Args:
        options: of ``torch.utils.checkpoint.checkpoint``. It does not save generator states: random numbers are keyed.
    """
    modes = _get_current_dispatch_mode_stack()
    drawing = next((mode for mode in reversed(modes) if isinstance(mode, KeyedRandom)), None)
    key, first = (drawing.key, drawing.ordinal) if drawing is not None else (None, 0)
    # Selective checkpointing chooses with these contexts what is saved.
    chosen: Callable[[], _Contexts] | None = body.meta.get("_checkpoint_context_fn")

    @contextmanager
    def again(selected: AbstractContextManager[Any]) -> Iterator[None]:
        with selected, nullcontext() if key is None else KeyedRandom(key, first):
            yield

    def contexts() -> _Contexts:
        forward, recomputed = chosen() if chosen is not None else (nullcontext(), nullcontext())
        return forward, again(recomputed)

    options |= {"use_reentrant": False, "preserve_rng_state": False, "context_fn": contexts}
    return checkpoint(body, *arguments, **options)


@frozen(eq=False, slots=False)
class CutGraph:
    """A graph cut into stages, for arguments of certain shapes.

    Args:
        batched: positions of the arguments that are cut, and of numbers that are their size.
        outputs: the graph's output nodes, in order.
        differentiable: those of them that have a gradient.
        random: whether random numbers are drawn.
    """

    stages: Sequence[Stage]
    sizes: Sequence[int]
    batched: frozenset[int]
    outputs: Sequence[fx.Node]
    differentiable: frozenset[fx.Node]
    random: bool
