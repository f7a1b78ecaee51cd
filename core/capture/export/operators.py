"""From a captured step to the operator graph that planning cuts.

Not every node of the captured graph becomes an operator of its own:

1. *Local* nodes depend on nothing but the batch, constants, and buffers that nobody writes: positions, masks, rotary
   tables. Every worker has the batch, so a stage that needs one computes it itself; nothing of it crosses a cut.
2. Views and unpacked results belong to the operator whose storage they show, unless rule 3 has them with their reader.
3. What reads a tensor that is not contiguous, or whose gradient is not, belongs to the operator in front of it: what
   crosses a cut arrives contiguous, and kernels round other layouts differently in the last bit.
4. Whatever writes a computed tensor in place belongs together with what computed it, and whatever writes a buffer with
   all that reads the buffer, and with all that stands between: a cut there would show some readers an old value.
"""

import operator
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from functools import cached_property
from math import prod
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ...costs.graph import OpEdge, OpGraph, OpNode
from ...errors import PanpipeError, RequestError
from ..graph.functions import called_name
from ..graph.nodes import WITH_PREVIOUS, is_view, module_of, note_roots, root_of, written_arguments
from ..graph.randomness import KeyedRandom, random_key
from ..graph.sparse_gradients import refuse_sparse_gradients
from ..regions.modes import CASTS, CastWatch, ModalInterpreter, casts_once
from ..regions.region_writes import note_later_writes
from ..regions.regions import region_of
from ..values.sparse_tensors import refuse_sparse_results
from ..values.user_lines import line_of, reason_of
from .captured import CapturedStep


def tensor_bytes(value: Any) -> int:
    """Bytes of a tensor's elements; 0 for anything that is no tensor."""
    return prod(value.shape) * value.dtype.itemsize if isinstance(value, Tensor) else 0


class DrawCounter(ModalInterpreter):
    """Runs the captured graph on fake tensors with autograd on.

    Records per node: the fake result with its ``requires_grad``, the ordinal of its first random draw, and whether the
    result or a gradient of it is laid out otherwise than contiguously.
    """

    def __init__(self, step: CapturedStep) -> None:
        module = fx.GraphModule(step.modules, step.graph)
        super().__init__(module, garbage_collect_values=False)
        self.extra_traceback = False  # an error names the line itself
        with step.fake_mode:
            self.random = KeyedRandom(random_key(0, 0, 0))
        self.first_draw: dict[str, int] = {}
        self.values: dict[str, Any] = {}
        self.strided: set[str] = set()
        self._flowed: set[int] = set()
        self._hooked: dict[int, int] = {}
        self._nodes = list(step.graph.nodes)
        self._parameters = step.parameters

    def run_node(self, n: fx.Node) -> Any:
        before = self.random.ordinal
        with self.random, CastWatch() if casts_once(n) else nullcontext() as watch:
            value = self._run(n)
        if watch is not None:
            self._note_casts(n, watch.casts)
        region = region_of(n)
        if region is not None:
            self.random.ordinal += region.draws
        if self.random.ordinal != before:
            self.first_draw[n.name] = before
        self.values[n.name] = value
        for tensor in _tensors(value) if n.op == "call_function" else ():
            key = id(tensor)
            self._note_layout(n.name, tensor)
            if tensor.requires_grad:
                self._hooked[key] = tensor._version
                tensor.register_hook(lambda gradient, name=n.name, key=key: self._note_flow(name, key, gradient))
        return value

    def _run(self, n: fx.Node) -> Any:
        try:
            return super().run_node(n)
        except PanpipeError:
            raise
        except Exception as error:
            raise RequestError(
                f"{line_of(n)}: {n.target} cannot be cut out of the step: {reason_of(error)}; use another operator"
            ) from error

    def _note_casts(self, n: fx.Node, casts: Mapping[int, torch.dtype]) -> None:
        """Note at an operator the parameters that autocast cast for it, under all their placeholders."""
        read = {s: self.env[s] for s in n.all_input_nodes if s.name in self._parameters}
        found = {self._parameters[s.name]: casts[id(t)] for s, t in read.items() if t.requires_grad and id(t) in casts}
        if found:
            n.meta[CASTS] = {p: found[name] for p, name in self._parameters.items() if name in found}

    def _note_layout(self, name: str, value: Tensor | None) -> None:
        if value is not None and not value.is_contiguous():
            self.strided.add(name)

    def _note_flow(self, name: str, tensor: int, gradient: Tensor | None) -> None:
        self._flowed.add(tensor)
        self._note_layout(name, gradient)

    def note_gradients(self, loss: str) -> None:
        """Run the backward, for the layout of every gradient; what gets none is taken for detached.

        A probe whose result is a metric, say, has no gradient, and its parameters shall have none, as in eager.
        """
        leaves = [t for t in self.values.values() if isinstance(t, Tensor) and t.requires_grad and t.is_leaf]
        self._flowed.add(id(self.values[loss]))
        try:
            torch.autograd.grad(self.values[loss], leaves, allow_unused=True)
        except RuntimeError as error:
            raise RequestError(
                f"the step's backward cannot be traced: {reason_of(error)}; use another operator there"
            ) from error

        def flowing(tensor: Tensor) -> Tensor:
            # What is written in place has its gradient behind that, where no hook of the tensor before sees it.
            unseen = self._hooked.get(id(tensor)) != tensor._version
            return tensor if not tensor.requires_grad or unseen or id(tensor) in self._flowed else tensor.detach()

        for node in self._nodes:
            if node.op == "call_function":
                self.values[node.name] = pytree.tree_map_only(Tensor, flowing, self.values[node.name])


@define(slots=False)
class Operators:
    """The operators of a captured step.

    Args:
        step: the captured step.
        graph: the operator graph, costs of time still 0.
        members: name of each operator → its nodes of the captured graph, in order.
        local: names of nodes that every stage computes for itself.
        first_draw: node name → ordinal of its first random draw in the whole graph, for nodes that draw.
        values: node name → fake result; ``requires_grad`` tells whether a gradient flows.
    """

    step: CapturedStep
    graph: OpGraph
    members: dict[str, tuple[str, ...]]
    local: frozenset[str]
    first_draw: dict[str, int]
    values: dict[str, Any] = field(repr=False)

    @cached_property
    def nodes(self) -> dict[str, fx.Node]:
        """Nodes of the captured graph by name."""
        return {node.name: node for node in self.step.graph.nodes}

    @cached_property
    def owner(self) -> dict[str, str]:
        """Operator of every node that belongs to one."""
        return {member: name for name, members in self.members.items() for member in members}


def operators_of(
    step: CapturedStep, state_bytes: Callable[[int], int] | None = None, *, apart: Collection[str] = ()
) -> Operators:
    """Group the captured nodes into operators and lay out the graph between them.

    Args:
        step: the captured step.
        state_bytes: bytes of parameters, gradients and optimizer state from bytes of parameters; the default is Adam's,
            four times the parameters.
        apart: names of nodes that rules 2 and 3 leave apart from what is in front of them.
    """
    counter = DrawCounter(step)
    with step.fake_mode:  # or what reads no tensor, such as a range, would be a real one, and so all that reads it
        counter.run(*_fake_inputs(step))
    refuse_sparse_results(step.graph, counter.values)
    note_roots(step.graph, counter.values)
    note_later_writes(step.graph, counter.values)
    if step.gradients and not counter.values[step.outputs.home].requires_grad:
        raise RequestError(
            "the loss does not depend on any parameter that requires a gradient: there is nothing to train; "
            "check requires_grad, and that the step does not detach"
        )
    calls = [node for node in step.graph.nodes if node.op == "call_function"]
    refuse_sparse_gradients(calls, counter.values)
    if step.gradients:
        counter.note_gradients(step.outputs.home)
    live = _live(step)
    local = _local_nodes(step, calls, counter)
    groups = _groups([node for node in calls if node.name not in local and node in live], counter, apart)
    names = _names(groups)
    members = {name: tuple(node.name for node in group) for name, group in zip(names, groups, strict=True)}
    graph = _graph(step, names, groups, local, counter, state_bytes or (lambda size: 4 * size))
    return Operators(step, graph, members, frozenset(local), counter.first_draw, counter.values)


def _fake_inputs(step: CapturedStep) -> list[Any]:
    with step.fake_mode:
        return [
            step.fake_mode.from_tensor(step.constants[node.name]) if node.name in step.constants else node.meta["val"]
            for node in step.graph.nodes
            if node.op == "placeholder"
        ]


def _live(step: CapturedStep) -> set[fx.Node]:
    """Nodes that the result of the step depends on, and those that write something."""
    live: set[fx.Node] = set()
    for node in reversed(step.graph.nodes):
        if node.op == "output" or node in live or written_arguments(node):
            live.add(node)
            live.update(node.all_input_nodes)
    return live


def _local_nodes(step: CapturedStep, calls: list[fx.Node], counter: DrawCounter) -> set[str]:
    written = {root_of(argument).name for node in calls for argument in written_arguments(node)}
    free = {node.name for node in step.graph.nodes if node.op in ("placeholder", "get_attr")}
    free -= set(step.parameters) | (written - set(step.constants) - set(step.batch))
    local: set[str] = set()
    for node in calls:
        value = counter.values[node.name]
        if (
            all(source.name in free or source.name in local for source in node.all_input_nodes)
            and node.name not in counter.first_draw
            and node.name != step.outputs.home
            and root_of(node).name not in written
            and not any(t.requires_grad for t in _tensors(value))
        ):
            local.add(node.name)
    return local


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for v in value for t in _tensors(v)] if isinstance(value, tuple | list) else []


def _groups(calls: list[fx.Node], counter: DrawCounter, apart: Collection[str]) -> list[list[fx.Node]]:
    """Cut the order of the nodes into operators (rules 2 to 4 of the module)."""
    position = {node: i for i, node in enumerate(calls)}
    # Whether a node belongs together with the one in front of it.
    joined = [i > 0 and bool(node.meta.get(WITH_PREVIOUS)) for i, node in enumerate(calls)]
    for i, node in enumerate(calls):
        source = node.args[0] if node.args else None
        shows = node.target is operator.getitem or is_view(node)
        free = i > 0 and node.name not in apart
        if free and shows and node.name not in counter.strided and isinstance(source, fx.Node) and source in position:
            joined[i] = _no_larger(node, source, counter) and _between_shows(calls, position[source], i)
        if free and any(
            s.name in counter.strided and _group_end(calls, joined, position, s) == i - 1 for s in node.all_input_nodes
        ):
            joined[i] = True
        for argument in written_arguments(node):
            root = root_of(argument)
            # What is computed may be read anywhere behind its last write; a buffer lives with all its readers.
            ends = [i, position[root]] if root in position else [j for j, n in enumerate(calls) if _touches(n, root)]
            for j in range(min(ends) + 1, max(ends) + 1):
                joined[j] = True
    groups: list[list[fx.Node]] = []
    for node, with_previous in zip(calls, joined, strict=True):
        if with_previous and groups:
            groups[-1].append(node)
        else:
            groups.append([node])
    return groups


def _group_end(calls: list[fx.Node], joined: list[bool], position: dict[fx.Node, int], node: fx.Node) -> int:
    """Position of the last node, so far, of the group that a node is in; -1 for what is in none."""
    end = position.get(node, -1)
    while 0 <= end < len(calls) - 1 and joined[end + 1]:
        end += 1
    return end


def _touches(node: fx.Node, root: fx.Node) -> bool:
    return any(root_of(source) is root for source in node.all_input_nodes)


def _no_larger(node: fx.Node, source: fx.Node, counter: DrawCounter) -> bool:
    shown, whole = ([tensor_bytes(t) for t in _tensors(counter.values[n.name])] for n in (node, source))
    return sum(shown) <= sum(whole)


def _between_shows(calls: list[fx.Node], start: int, end: int) -> bool:
    return all(calls[j].target is operator.getitem or is_view(calls[j]) for j in range(start + 1, end))


def computes(node: fx.Node) -> bool:
    """Whether a node is more than a view, or one of several results."""
    return not is_view(node) and node.target is not operator.getitem


def _names(groups: list[list[fx.Node]]) -> list[str]:
    """Module path / operator, with an ordinal from the second of a name on."""
    names: list[str] = []
    count: dict[str, int] = {}
    for group in groups:
        head = next((n for n in group if computes(n)), group[0])
        path = module_of(head)
        kind = (
            called_name(head)
            or getattr(head.target, "_opname", None)
            or getattr(head.target, "__name__", str(head.target))
        )
        base = f"{path}/{kind}" if path else f"/{kind}"
        count[base] = count.get(base, 0) + 1
        names.append(base if count[base] == 1 else f"{base}.{count[base]}")
    return names


def _graph(
    step: CapturedStep,
    names: list[str],
    groups: list[list[fx.Node]],
    local: set[str],
    counter: DrawCounter,
    state_bytes: Callable[[int], int],
) -> OpGraph:
    owner = {node.name: i for i, group in enumerate(groups) for node in group}
    sizes = {node.name: tensor_bytes(node.meta["val"]) for node in step.graph.nodes if node.op == "placeholder"}
    seen: set[str] = set()
    nodes, edges = [], {}
    for i, group in enumerate(groups):
        reads: dict[str, int] = {}
        for node in group:
            for source in node.all_input_nodes:
                if source.name in step.parameters:
                    reads[step.parameters[source.name]] = sizes[source.name]
                elif source.name in owner and owner[source.name] != i:
                    producer = groups[owner[source.name]]
                    which = producer.index(source)
                    value = counter.values[source.name]
                    key = owner[source.name], i, which
                    edges[key] = OpEdge(
                        names[key[0]], names[i], sum(map(tensor_bytes, _tensors(value))),
                        gradient=any(t.requires_grad for t in _tensors(value)), tensor=which,
                    )  # fmt: skip
        own = sum(size for name, size in reads.items() if name not in seen)
        seen.update(reads)
        nodes.append(OpNode(names[i], parameter_bytes=own, state_bytes=state_bytes(own), parameters=tuple(reads)))
    return OpGraph(tuple(nodes), tuple(edges[key] for key in sorted(edges)), name=step.model_name)
