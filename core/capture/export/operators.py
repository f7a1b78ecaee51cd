"""Groups the nodes of a captured step into operators: the graph that planning cuts into stages.

Nodes of the captured graph are grouped into operators:

1. *Local* nodes depend only on the batch, constants, and buffers that are not written: positions, masks, rotary tables.
   They belong to no operator. Every worker has the batch, so each stage computes the local nodes that it needs.
2. Views and unpacked results belong to the operator whose storage they share, unless rule 3 groups them with a reader.
3. A node that reads a tensor which is not dense, or whose gradient is not, belongs to the operator before it: messages
   are dense, in the order of dimensions that the gradient has in memory. Kernels round other layouts differently in the
   last bit.
4. A node that writes a computed tensor in place is grouped with the node that computed it, and one that writes a buffer
   with all readers of the buffer, and with all nodes between them. With a cut there, some readers would get an old
   value.
"""

import operator
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from math import prod
from typing import Any

import torch
from attrs import define, evolve, field
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._prims_common import is_contiguous_or_false
from torch.fx.experimental.symbolic_shapes import guard_or_true
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from ...costs.graph import OpEdge, OpGraph, OpNode
from ...errors import PanpipeError, RequestError
from ..graph.autograd_functions import called_name
from ..graph.generated_sources import sources_removed
from ..graph.nodes import (
    WITH_PREVIOUS,
    ancestors,
    fixed_nodes,
    is_view,
    module_of,
    note_roots,
    root_of,
    written_arguments,
    written_roots,
)
from ..graph.randomness import KeyedRandom, random_key
from ..graph.rewrites import refuse_sparse_gradients
from ..graph.sizes import NUMBERS, Sizes, hint
from ..python.torch_settings import without_anomaly_mode
from ..regions.modes import CASTS, CastWatch, ModalInterpreter, casts_once
from ..regions.regions import region_of
from ..values.nesting import tensors_of
from ..values.user_lines import line_of, message_start, reason_of
from .captured_step import CapturedStep


def dense_order(value: Tensor) -> tuple[int, ...]:
    """The dimensions by their strides, the largest first; () if this is their order, or if one is expanded.

    The captured operators depend on the strides of what they read: a transposed tensor that arrives contiguous may give
    an attention a result that the next `view` cannot show, and another last bit to a sum.
    """
    strides = value.stride()
    wide = [dim for dim, n in enumerate(value.shape) if guard_or_true(n > 1)]
    if is_contiguous_or_false(value) or any(strides[dim] == 0 for dim in wide):
        return ()
    by_stride = iter(sorted(wide, key=strides.__getitem__, reverse=True))
    # Strides of dimensions with one element say nothing: these stay where they are.
    order = tuple(next(by_stride) if dim in wide else dim for dim in range(value.dim()))
    return order if order != tuple(range(value.dim())) else ()


def is_dense(value: Tensor) -> bool:
    """Whether a tensor's elements fill its memory without gaps, in some order of its dimensions."""
    order = dense_order(value)
    return is_contiguous_or_false(value.permute(order) if order else value)


def tensor_bytes(value: Any) -> int:
    """Bytes of a tensor's elements, with symbolic sizes those of the example; 0 for any other value."""
    return prod(map(hint, value.shape)) * value.dtype.itemsize if isinstance(value, Tensor) else 0


@define(slots=False)
class Operators:
    """The operators of a captured step.

    Args:
        step: the captured step.
        graph: the operator graph, costs of time still 0.
        members: name of each operator → its nodes of the captured graph, in order.
        local: names of nodes that each stage computes itself.
        first_draw: node name → ordinal of its first random draw in the whole graph, for nodes that draw.
        values: node name → fake result; with ``requires_grad`` if a gradient flows.
        orders: node name → order of its gradient's dimensions in memory, where it is not that of the result.
        traces: of parts of the step, see `..programs.equal_layers`.
        symbolic: the capture with symbolic sizes that these come from, and the values of its symbols; None without.
    """

    step: CapturedStep
    graph: OpGraph
    members: dict[str, tuple[str, ...]]
    local: frozenset[str]
    first_draw: dict[str, int]
    values: dict[str, Any] = field(repr=False)
    orders: dict[str, tuple[int, ...]] = field(repr=False, factory=dict)
    traces: dict[Any, Any] = field(factory=dict, eq=False, repr=False)
    symbolic: "tuple[Operators, Sizes] | None" = field(default=None, eq=False, repr=False)

    def with_sizes(self, sizes: Sizes) -> "Operators":
        """The operators as if the step was captured with these sizes, which are those of the example.

        Raises:
            NotSymbolic: a sub-graph depends on sizes.
        """
        step = self.step.with_sizes(sizes)
        with step.fake_mode:
            values = {name: pytree.tree_map_only((Tensor, *NUMBERS), sizes.fake, v) for name, v in self.values.items()}
        return evolve(self, step=step, values=values, traces={}, symbolic=(self, sizes))

    @cached_property
    def nodes(self) -> dict[str, fx.Node]:
        """Nodes of the captured graph by name."""
        return {node.name: node for node in self.step.graph.nodes}

    @cached_property
    def fixed(self) -> frozenset[str]:
        """Names of nodes that depend on parameters, buffers that are not written and constants alone: every stage
        computes those that it reads once a step (``programs/shared_program``)."""
        step, written = self.step, written_roots(self.step.graph.nodes)
        names = {*step.parameters, *step.buffers, *step.constants} - written
        inputs = {node: None for node in step.graph.nodes if node.op == "placeholder" and node.name in names}
        found = fixed_nodes(step.graph, inputs, (), lambda node: self.values.get(node.name))
        return frozenset(
            node.name
            for node in found
            if node.name not in self.first_draw and node.name not in self.local and root_of(node).name not in written
        )

    @cached_property
    def owner(self) -> dict[str, str]:
        """Node name → its operator, for nodes that belong to one."""
        return {member: name for name, members in self.members.items() for member in members}


class FakeRun(ModalInterpreter):
    """Runs the captured graph on fake tensors with autograd enabled.

    Records per node: the fake result with its ``requires_grad``, the ordinal of its first random draw, whether the
    result or its gradient is not dense, and the order of its gradient's dimensions.
    """

    @sources_removed()
    def __init__(self, step: CapturedStep) -> None:
        module = fx.GraphModule(step.modules, step.graph)
        super().__init__(module, garbage_collect_values=False)
        self.extra_traceback = False  # an error names the line itself
        with step.fake_mode:
            self.random = KeyedRandom(random_key(0, 0, 0))
        self.first_draw: dict[str, int] = {}
        self.values: dict[str, Any] = {}
        self.strided: set[str] = set()
        self.orders: dict[str, tuple[int, ...]] = {}
        self._flowed: set[int] = set()
        self._hooked: dict[int, int] = {}
        self._hooks: list[RemovableHandle] = []
        self._nodes = list(step.graph.nodes)
        self._step, self._parameters = step, step.parameters

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
        for tensor in tensors_of(value) if n.op == "call_function" else ():
            key = id(tensor)
            if not is_dense(tensor):
                self.strided.add(n.name)
            if tensor.requires_grad:
                self._hooked[key] = tensor._version
                hook = partial(self._note_flow, n.name, key)
                self._hooks.append(tensor.register_hook(hook))
        return value

    def _run(self, n: fx.Node) -> Any:
        try:
            return super().run_node(n)
        except PanpipeError:
            raise
        except Exception as error:
            raise RequestError(
                f"{line_of(n)}: {n.target} cannot run by itself, outside of the step: {reason_of(error)}; use another "
                "operator"
            ) from error

    def _note_casts(self, n: fx.Node, casts: Mapping[int, torch.dtype]) -> None:
        """Record at an operator the parameters that autocast cast for it, under all their placeholders."""
        read = {s: self.env[s] for s in n.all_input_nodes if s.name in self._parameters}
        found = {self._parameters[s.name]: casts[id(t)] for s, t in read.items() if t.requires_grad and id(t) in casts}
        if found:
            n.meta[CASTS] = {p: found[name] for p, name in self._parameters.items() if name in found}

    def _note_flow(self, name: str, tensor: int, gradient: Tensor | None) -> None:
        self._flowed.add(tensor)
        if gradient is None:
            return
        if not is_dense(gradient):
            self.strided.add(name)
        elif isinstance(value := self.values[name], Tensor) and (order := dense_order(gradient)) != dense_order(value):
            self.orders[name] = order

    def note_gradients(self, loss: str) -> None:
        """Run the backward to record the layout of every gradient; tensors without a gradient are detached.

        For instance, a probe whose result is only a metric gets no gradient, and neither do its parameters, as in eager
        PyTorch.
        """
        leaves = [t for t in self.values.values() if isinstance(t, Tensor) and t.requires_grad and t.is_leaf]
        self._flowed.add(id(self.values[loss]))
        try:
            with without_anomaly_mode(), _modes(self._step):
                torch.autograd.grad(self.values[loss], leaves, allow_unused=True)
        except PanpipeError:
            raise
        except Exception as error:  # an operator's own backward may raise any
            if (line := self._hidden_write()) and "modified by an inplace operation" in str(error):
                raise RequestError(
                    f"{line}: this line writes, by .data, .detach() or under no_grad, into a tensor that the backward "
                    "of an operator before it reads: use a function that returns a new tensor, such as masked_fill"
                ) from error
            raise RequestError(
                f"the step's backward cannot be traced: {reason_of(error)}; use another operator there"
            ) from error
        finally:
            # The graph of autograd, which Python's collector cannot see, would hold this run, and this run its tensors.
            while self._hooks:
                self._hooks.pop().remove()

        def flowing(tensor: Tensor) -> Tensor:
            # After a write in place, the gradient is that of the new value, and the hook of the old one is not called.
            unseen = self._hooked.get(id(tensor)) != tensor._version
            return tensor if not tensor.requires_grad or unseen or id(tensor) in self._flowed else tensor.detach()

        for node in self._nodes:
            if node.op == "call_function":
                self.values[node.name] = pytree.tree_map_only(Tensor, flowing, self.values[node.name])

    def _hidden_write(self) -> str:
        """The line of the first write in place, hidden from autograd, into a computed tensor with a gradient; or ""."""
        for node in self._nodes:
            for argument in written_arguments(node):
                root, modes = root_of(argument), node.meta.get("modes")
                hidden = not self.values[argument.name].requires_grad or (modes is not None and not modes.grad)
                computed = tensors_of(self.values[root.name]) if root.op == "call_function" else []
                if hidden and any(tensor.requires_grad for tensor in computed):
                    return line_of(node)
        return ""


@contextmanager
def _modes(step: CapturedStep) -> Iterator[None]:
    """The context of a run: otherwise operators without tensor arguments, such as arange, would return real tensors."""
    # Some composite operators take symbolic sizes in Python alone.
    with step.fake_mode, enable_python_dispatcher() if step.sizes is not None else nullcontext():
        yield


def fake_inputs(step: CapturedStep) -> list[Any]:
    """The inputs of a run: fake constants, and the fake values of the other placeholders."""
    with step.fake_mode:
        return [
            step.fake_mode.from_tensor(step.constants[node.name], static_shapes=True)
            if node.name in step.constants
            else node.meta["val"]
            for node in step.graph.nodes
            if node.op == "placeholder"
        ]


_STATE = 4
"""Bytes of parameters, gradients and optimizer state per byte of parameters, until the optimizer is known: Adam's."""


def operators_of(step: CapturedStep, *, apart: Collection[str] = ()) -> Operators:
    """Group the captured nodes into operators, and build the graph of these.

    Args:
        step: the captured step.
        apart: names of nodes that rules 2 and 3 do not group with the node before them.
    """
    fake_run = FakeRun(step)
    with _modes(step):
        fake_run.run(*fake_inputs(step))
    note_roots(step.graph, fake_run.values)
    if step.gradients and not fake_run.values[step.outputs.main_result].requires_grad:
        loss = next(node for node in step.graph.nodes if node.name == step.outputs.main_result)
        raise RequestError(
            f"{message_start(line_of(loss))}the loss does not depend on any parameter that requires a gradient: there "
            "is nothing to train; check requires_grad, and that the step neither detaches it nor computes it under "
            "no_grad or from argmax"
        )
    calls = [node for node in step.graph.nodes if node.op == "call_function"]
    refuse_sparse_gradients(calls, fake_run.values)
    if step.gradients:
        fake_run.note_gradients(step.outputs.main_result)
    # What the result of the step depends on, and what writes in place.
    needed = ancestors([step.graph.output_node(), *filter(written_arguments, calls)])
    local = _local_nodes(step, calls, fake_run)
    groups = _groups([node for node in calls if node.name not in local and node in needed], fake_run, apart)
    names = _names(groups)
    members = {name: tuple(node.name for node in group) for name, group in zip(names, groups, strict=True)}
    graph = _graph(step, names, groups, fake_run)
    return Operators(step, graph, members, frozenset(local), fake_run.first_draw, fake_run.values, fake_run.orders)


def _local_nodes(step: CapturedStep, calls: list[fx.Node], fake_run: FakeRun) -> set[str]:
    written = written_roots(calls)
    free = {node.name for node in step.graph.nodes if node.op in ("placeholder", "get_attr")}
    free -= set(step.parameters) | (written - set(step.constants) - set(step.batch))
    local: set[str] = set()
    for node in calls:
        value = fake_run.values[node.name]
        if (
            all(source.name in free or source.name in local for source in node.all_input_nodes)
            and node.name not in fake_run.first_draw
            and node.name != step.outputs.main_result
            and root_of(node).name not in written
            and not any(t.requires_grad for t in tensors_of(value))
        ):
            local.add(node.name)
    return local


def _groups(calls: list[fx.Node], fake_run: FakeRun, apart: Collection[str]) -> list[list[fx.Node]]:
    """Divide the order of the nodes into operators (rules 2 to 4 of the module)."""
    position = {node: i for i, node in enumerate(calls)}
    # Whether a node belongs to the operator of the node before it.
    joined = [i > 0 and bool(node.meta.get(WITH_PREVIOUS)) for i, node in enumerate(calls)]
    for i, node in enumerate(calls):
        source = node.args[0] if node.args else None
        free, shows = i > 0 and node.name not in apart, not computes(node)
        if free and shows and node.name not in fake_run.strided and isinstance(source, fx.Node) and source in position:
            computed_between = any(computes(calls[j]) for j in range(position[source] + 1, i))
            joined[i] = _is_no_larger(node, source, fake_run) and not computed_between
        if free and any(
            s.name in fake_run.strided and _group_end(calls, joined, position, s) == i - 1 for s in node.all_input_nodes
        ):
            joined[i] = True
        for argument in written_arguments(node):
            root = root_of(argument)
            # A computed tensor may be read anywhere after its last write; a buffer is in one operator with its readers.
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
    """Position of the last node, so far, of a node's group; -1 if it is in none."""
    end = position.get(node, -1)
    while 0 <= end < len(calls) - 1 and joined[end + 1]:
        end += 1
    return end


def _touches(node: fx.Node, root: fx.Node) -> bool:
    return any(root_of(source) is root for source in node.all_input_nodes)


def _is_no_larger(node: fx.Node, source: fx.Node, fake_run: FakeRun) -> bool:
    """Whether a view, or a part of a result, has no more bytes than its source, unlike an expanded tensor."""
    shown, whole = ([tensor_bytes(t) for t in tensors_of(fake_run.values[n.name])] for n in (node, source))
    return sum(shown) <= sum(whole)


def computes(node: fx.Node) -> bool:
    """Whether a node is neither a view nor the selection of a result."""
    return not is_view(node) and node.target is not operator.getitem


def _names(groups: list[list[fx.Node]]) -> list[str]:
    """Names of operators: module path / operator, with an ordinal from the second operator with a name."""
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


def _graph(step: CapturedStep, names: list[str], groups: list[list[fx.Node]], fake_run: FakeRun) -> OpGraph:
    owner = {node.name: i for i, group in enumerate(groups) for node in group}
    sizes = {node.name: tensor_bytes(node.meta["val"]) for node in step.graph.nodes if node.op == "placeholder"}
    seen: set[str] = set()
    nodes, edges = [], {}
    for i, group in enumerate(groups):
        reads: dict[str, int] = {}
        frozen: list[str] = []
        for node in group:
            for source in node.all_input_nodes:
                if source.name in step.parameters:
                    reads[step.parameters[source.name]] = sizes[source.name]
                    if not source.meta["val"].requires_grad:
                        frozen.append(step.parameters[source.name])
                elif source.name in owner and owner[source.name] != i:
                    producer = groups[owner[source.name]]
                    which = producer.index(source)
                    value = fake_run.values[source.name]
                    key = owner[source.name], i, which
                    edges[key] = OpEdge(
                        names[key[0]], names[i], sum(map(tensor_bytes, tensors_of(value))),
                        gradient=any(t.requires_grad for t in tensors_of(value)), tensor=which,
                    )  # fmt: skip
        own = sum(size for name, size in reads.items() if name not in seen)
        seen.update(reads)
        nodes.append(
            OpNode(
                names[i], parameter_bytes=own, state_bytes=_STATE * own, parameters=tuple(reads),
                frozen=tuple(dict.fromkeys(frozen)),
            )
        )  # fmt: skip
    return OpGraph(tuple(nodes), tuple(edges[key] for key in sorted(edges)), name=step.model_name)
