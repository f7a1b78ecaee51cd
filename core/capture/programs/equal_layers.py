"""The joint graph of a stage of equal layers, assembled from traces of its parts: a layer is traced once.

::

    stage       a ──▶ layer ──▶ layer ──▶ c      operators of the captured step
    forward     F(a)  F(layer)  F(layer)  F(c)   copies of their traces, in order
    backward    B(c)  B(layer)  B(layer)  B(a)   in reverse order, as autograd runs it

Autograd sums the gradients of a tensor with several readers in the reverse order of these. So the trace of a reader
also returns the tensor itself, if a later part has a gradient for it: that gradient is then the first summand. An
assembled graph is that of a trace of the whole stage; where it might not be, the stage is traced as a whole.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.traceback import GRADIENT_ACC_SPECIAL_STACK

from ...errors import RequestError
from ..graph.nodes import root_of, written_arguments
from ..graph.randomness import DRAWS_AT, KEYED
from ..regions.modes import CASTS
from ..regions.regions import runs_region
from .joint_graph import BACKWARD, CAPTURED, JointGraph, trace_joint
from .sections import repetition
from .stage import KEY, OPERATOR, StageGraph, StageInputs

aten = torch.ops.aten

LEAST = 40
"""Smallest number of nodes of repeated layers that are not traced again: to trace a part by itself takes as long as a
dozen nodes."""


class _Differs(Exception):
    """Assembled, the graph might differ from that of a trace of the whole stage."""


def stage_joint(stage: StageGraph) -> JointGraph:
    """Forward and backward of a stage; arguments and errors as of `trace_joint`."""
    try:
        return Assembly(stage).joint()
    except (_Differs, RequestError):  # the whole trace has the error, too, if it is the user's
        return trace_joint(stage)


def work_key(
    members: Sequence[fx.Node],
    given: Sequence[fx.Node],
    returned: Sequence[fx.Node],
    value_of: Callable[[fx.Node], Any],
    draws: Iterable[str],
) -> tuple[Hashable, ...]:
    """Equal for operators that compute the same from inputs of equal layout.

    Args:
        members: the operators' nodes, in order.
        given: nodes outside that they read.
        returned: members that are read outside.
        value_of: the fake result of a node.
        draws: names of nodes that draw random numbers.
    """
    place = {node: ("given", i) for i, node in enumerate(given)}
    place |= {node: ("member", i) for i, node in enumerate(members)}

    def plain(value: Any) -> Hashable:
        if isinstance(value, fx.Node):
            return place.get(value) or ("value", str(value.target if value.op == "get_attr" else value_of(value)))
        if isinstance(value, list | tuple):
            return tuple(map(plain, value))
        if isinstance(value, dict):
            return tuple((k, plain(v)) for k, v in value.items())
        return type(value).__name__, str(value)

    def casts(node: fx.Node) -> Hashable:
        found = node.meta.get(CASTS)
        return found and tuple(found.get(source.name) for source in node.all_input_nodes)

    calls = tuple(
        (n.target, plain(n.args), plain(n.kwargs), n.meta.get("modes"), casts(n), n.name in draws) for n in members
    )
    layouts = (tuple((place[n], _layout(value_of(n))) for n in nodes) for nodes in (given, returned))
    return calls, *layouts


def _layout(value: Any) -> Hashable:
    if not isinstance(value, Tensor):
        return str(value)
    sizes = (*value.shape, "", *value.stride(), "", value.untyped_storage().nbytes())
    return (
        tuple(n if isinstance(n, int | str) else str(n) for n in sizes), value.dtype, value.device,
        value.requires_grad,
    )  # fmt: skip


@frozen(eq=False)
class _Part:
    """Some operators of a stage that are traced together.

    Args:
        nodes: of the stage graph, in order.
        given: tensors that they read.
        returned: those of them that are read outside.
    """

    nodes: list[fx.Node]
    given: list[fx.Node]
    returned: list[fx.Node]


@frozen(eq=False)
class _Trace:
    """The trace of a part, for all equal ones.

    Args:
        joint: its graph; its inputs are those of the part, then the random key.
        origins: for each node of the part the name of the value whose storage it shows, and its stack trace.
    """

    joint: JointGraph
    origins: list[tuple[str, str]]


def _origins(part: _Part) -> list[tuple[str, str]]:
    return [(root_of(node).name, node.meta.get("stack_trace", "")) for node in part.nodes]


class _Copy(NamedTuple):
    """A part in an assembled graph: what it returns, its trace, and node of the trace → its copy."""

    part: _Part
    ends: list[fx.Node]
    trace: _Trace
    nodes: dict[fx.Node, fx.Node]


class Assembly:
    """Assembles the joint graph of a stage.

    Args:
        stage: of equal layers.

    Raises:
        _Differs: it has none, or the graph might differ from that of a trace of the whole stage.
    """

    def __init__(self, stage: StageGraph) -> None:
        self._stage = stage
        nodes = list(stage.graph.nodes)
        self._inputs = [node for node in nodes if node.op == "placeholder"]
        outputs: Any = nodes[-1].args[0]
        self._outputs: list[fx.Node] = list(outputs)
        self._values = dict(zip(self._inputs, stage.fakes, strict=True))
        plain = len(set(self._outputs)) == len(self._outputs) and all(n.op == "call_function" for n in self._outputs)
        if not stage.fakes or not plain:
            raise _Differs
        calls = [node for node in nodes if node.op == "call_function"]
        with stage.fakes[0].fake_mode, torch.enable_grad(), enable_python_dispatcher():  # type: ignore[attr-defined]
            for node in calls:
                target, (args, kwargs) = cast(Any, node.target), fx.map_arg((node.args, node.kwargs), self._values.get)
                self._values[node] = node.meta["val"] if OPERATOR in node.meta else target(*args, **kwargs)
        groups = _operators(calls)
        parts = [self._part(group) for group in groups]
        known: dict[Hashable, int] = {}
        labels = np.array([known.setdefault(self._key(part), len(known)) for part in parts])
        bounds = _repetitions(labels, groups, 0, len(groups))
        if not bounds:
            raise _Differs
        ranges = pairwise(sorted({0, *bounds, len(groups)}))
        self._parts = [self._part(list(chain.from_iterable(groups[low:high]))) for low, high in ranges]
        self._check_casts()

    def _key(self, part: _Part) -> Hashable:
        return work_key(part.nodes, part.given, part.returned, self._values.__getitem__, self._stage.first_draw)

    def _part(self, nodes: list[fx.Node]) -> _Part:
        inside = set(nodes)
        read = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source.op != "get_attr")
        part = _Part(
            nodes, [node for node in read if node not in inside],
            [node for node in nodes if not inside.issuperset(node.users)],
        )  # fmt: skip
        written = {root_of(argument).name for node in nodes for argument in written_arguments(node)}
        if not all(_is_plain(self._values[node]) for node in (*part.given, *part.returned)):
            raise _Differs
        if any(node.target is aten.as_strided.default for node in nodes):  # it reads memory, and not a tensor
            raise _Differs
        if not written.issubset(node.name for node in (*nodes, *self._inputs)):
            raise _Differs
        return part

    def _check_casts(self) -> None:
        """A parameter that autocast casts for several parts is cast once for all of them."""
        cast = [name for part in self._parts for name in {n for node in part.nodes for n in node.meta.get(CASTS, ())}]
        if len(cast) != len(set(cast)):
            raise _Differs

    def joint(self) -> JointGraph:
        """The joint graph; errors as of the class, and of `trace_joint`."""
        starts = [(i, fake) for i, fake in enumerate(self._stage.tangents) if fake is not None]
        flowing, copies = {self._outputs[i]: fake for i, fake in starts}, list[_Copy]()
        for part in reversed(self._parts):
            ends = [*part.returned, *(node for node in part.given if node in flowing)]
            trace = self._trace(part, ends, flowing)
            copies.append(_Copy(part, ends, trace, {}))
            flowing.update((part.given[i], node.meta["val"]) for i, node in trace.joint.gradients.items())
        graph = fx.Graph()
        made = {node: _placeholder(graph, node.name, self._values[node]) for node in self._inputs}
        primals = dict(enumerate(made.values()))
        key = primals[len(primals) - 1]  # if it is no random key, nothing reads it
        tangents = {i: _placeholder(graph, f"tangent_{i}", fake) for i, fake in starts}
        gradients, constants = {self._outputs[i]: tangent for i, tangent in tangents.items()}, dict[str, Tensor]()
        for part, _, trace, nodes in reversed(copies):
            inputs = [*(made[node] for node in part.given), key]
            nodes.update((node, inputs[i]) for i, node in trace.joint.primals.items())
            self._copy(graph, part, trace, nodes, constants, backward=False)
            made.update((node, nodes[found]) for node, found in zip(part.returned, trace.joint.outputs, strict=False))
            made.update((part.given[i], nodes[node]) for i, node in trace.joint.mutations.items())
        for part, ends, trace, nodes in copies:
            nodes.update((node, gradients[ends[i]]) for i, node in trace.joint.tangents.items())
            self._copy(graph, part, trace, nodes, constants, backward=True)
            gradients.update((part.given[i], nodes[node]) for i, node in trace.joint.gradients.items())
        changed = {i: made[node] for i, node in enumerate(self._inputs) if made[node] is not primals[i]}
        outputs = [made[node] for node in self._outputs]
        of_inputs = {i: gradients[node] for i, node in enumerate(self._inputs) if node in gradients}
        graph.output((*outputs, *changed.values(), *of_inputs.values()))
        return JointGraph(graph, primals, tangents, outputs, changed, of_inputs, constants)

    def _copy(
        self,
        graph: fx.Graph,
        part: _Part,
        trace: _Trace,
        copies: dict[fx.Node, fx.Node],
        constants: dict[str, Tensor],
        *,
        backward: bool,
    ) -> None:
        """Copy the forward or the backward of a part's trace into a graph.

        Args:
            graph: the graph.
            part: the part.
            trace: of it, or of an equal one.
            copies: node of the trace → its copy; all that it reads, and then the others, too.
            constants: of the graph.
            backward: which of them.
        """
        joint, draw = trace.joint, _first_draw(self._stage, part)
        pairs = list(zip(trace.origins, _origins(part), strict=True))
        names, lines = ({own[i]: new[i] for own, new in pairs} for i in (0, 1))
        for node in joint.graph.nodes:
            if node.op in ("placeholder", "output") or (BACKWARD in node.meta) is not backward:
                continue
            new = copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.op == "get_attr" and node.target in joint.constants:
                new.target = f"constant{len(constants)}"
                constants[new.target] = joint.constants[str(node.target)]
            elif node.op == "get_attr" and node.target not in self._stage.modules:
                raise _Differs
            elif node.target in DRAWS_AT or node.target in KEYED or runs_region(node):
                new.args = (*new.args[:-1], cast(int, new.args[-1]) + draw)
            line, *more = (node.meta.get("stack_trace") or "").partition(GRADIENT_ACC_SPECIAL_STACK)
            new.meta |= {"stack_trace": "".join((lines.get(line, line), *more))}
            if CAPTURED in new.meta:
                new.meta[CAPTURED] = names.get(new.meta[CAPTURED], new.meta[CAPTURED])

    def _trace(self, part: _Part, ends: list[fx.Node], flowing: Mapping[fx.Node, Tensor]) -> _Trace:
        """The trace of a part, or of an equal one.

        Args:
            part: the part.
            ends: the nodes that it returns.
            flowing: node → its gradient.
        """
        stage, values = self._stage, self._values
        tangents = [flowing.get(node) for node in ends]
        strides = [None if fake is None else fake.stride() for fake in tangents]
        passed = tuple(part.given.index(node) for node in ends[len(part.returned) :])
        found: _Trace | None = stage.known.get(key := (self._key(part), passed, str(strides)))
        if found is None:
            graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
            for node in part.given:
                copies[node] = graph.placeholder(node.name)
            graph.placeholder(KEY)
            for node in dict.fromkeys(s for n in part.nodes for s in n.all_input_nodes if s.op == "get_attr"):
                copies[node] = graph.node_copy(node)
            for node in part.nodes:
                copies[node] = graph.node_copy(node, copies.__getitem__)
            graph.output(tuple(copies[node] for node in ends))
            base = _first_draw(stage, part)
            draws = {copies[n].name: stage.first_draw[n.name] - base for n in part.nodes if n.name in stage.first_draw}
            with stage.fakes[0].fake_mode:  # type: ignore[attr-defined]
                fakes = *map(_leaf, (values[node] for node in part.given)), torch.empty(3, dtype=torch.int64)
                starts = tuple(None if fake is None else _leaf(fake.detach()) for fake in tangents)
            alone = evolve(
                stage, graph=graph, inputs=StageInputs((), (), (), (), (), True), first_draw=draws, fakes=fakes,
                outputs=(), results=(), tangents=starts,
            )  # fmt: skip
            joint = trace_joint(alone)
            found = stage.known[key] = _Trace(joint, _origins(part))
        sources = [found.joint.outputs[i] for i in found.joint.tangents]
        if len(set(sources)) != len(sources):  # it returns a tensor that it is given: their gradients are one sum
            raise _Differs
        return found


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and not (value.is_conj() or value.is_neg())


def _leaf(value: Tensor) -> Tensor:
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return made.requires_grad_(value.requires_grad)


def _operators(calls: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Divide the nodes of a stage into operators, each with what is computed before it for all of them."""
    found, loose, last = list[list[fx.Node]](), list[fx.Node](), None
    for node in calls:
        operator = node.meta.get(OPERATOR)
        loose.append(node)
        if operator is None:
            continue
        if operator == last:
            found[-1] += loose
        else:
            found.append(loose)
        loose, last = [], operator
    return [*found, loose] if loose else found


def _repetitions(labels: Any, groups: Sequence[Sequence[fx.Node]], low: int, high: int) -> list[int]:
    """The bounds of repeated labels between two positions: where fewest tensors cross, and of the rest, too."""
    found = repetition(labels[low:high])
    if found is None:
        return []
    period, start, end = found[0], low + found[1], low + found[2]
    first = min(range(start, start + period), key=lambda i: _crossing(groups, i))
    bounds = list(range(first, end + 1, period))
    if sum(map(len, groups[first + period : bounds[-1]])) < LEAST:
        return []
    before = _repetitions(labels, groups, low, first)
    return [*before, *bounds, *_repetitions(labels, groups, bounds[-1], high)]


def _crossing(groups: Sequence[Sequence[fx.Node]], position: int) -> int:
    """The number of tensors that are computed in groups before a position, and read there or later."""
    before = set(chain.from_iterable(groups[:position]))
    return sum(not before.issuperset(node.users) for node in before)


def _first_draw(stage: StageGraph, part: _Part) -> int:
    return min((stage.first_draw[node.name] for node in part.nodes if node.name in stage.first_draw), default=0)


def _placeholder(graph: fx.Graph, name: str, value: Tensor) -> fx.Node:
    node = graph.placeholder(name)
    with value.fake_mode:  # type: ignore[attr-defined]
        node.meta["val"] = value.detach()
    return node
