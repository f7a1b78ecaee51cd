"""Kernels of a step as a compiler or a library of fused kernels writes them.

==============  ====================================================================================================
``eager``       one kernel for each operator
``compiled``    operators of a layer that work element by element or along rows are one kernel where they are connected:
                it reads its inputs from memory once, and writes what others read, as the kernels of torch.compile do
                where it compiles each layer (torchtitan, ``apply_compile``); the head and the loss are eager. Of a
                model without layers all operators
``fused``       these of the whole model, attention at the rate that libraries reach where the device has one
                (``fused_attention_efficiency``), and products that add weight gradients themselves: the kernels of
                Transformer Engine and Megatron-LM
==============  ====================================================================================================

Such a group is a *section*: connected nodes of the captured graph with the same number of other nodes on the longest
path to them, so that no path leaves a section and returns::

    linear ─▶ add ─▶ norm ─▶ linear      sections: {add, norm}; {silu, mul}
               │                ├─▶ silu ─▶ mul ─▶ linear
               ╰────────────▶ add      linear ──╯

The backward of a section reads the gradients of its results and what it computes them from, and writes the gradients of
its inputs. It computes what is between them again (torch.compile's partitioner, functorch, min_cut_rematerialization):
saved are results that other sections read, or products if they are compiled, and inputs.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from attrs import define, evolve, field, frozen
from torch import fx

from ..capture.export.operators import Operators
from ..capture.graph.nodes import is_view, root_of
from ..capture.values.nesting import tensors_of
from ..costs.layers import is_in_layer
from .kernels import Kernel, touched_bytes
from .kinds import ELEMENTWISE, NORMALISATION, kind_of, operator_name
from .saved_storages import Storage
from .single_operator import LoneOperator
from .work import TracedOperator

_OTHERS = {
    "linear", "matmul", "einsum", "bilinear", "embedding", "embedding_bag", "scaled_dot_product_attention", "lstm",
    "gru", "rnn_tanh", "rnn_relu", "multi_head_attention_forward", "_native_multi_head_attention", "interpolate",
    "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "max_pool2d_with_indices", "roll", "sort", "unfold", "fold",
}  # fmt: skip
"""Operators of a captured step whose kind is that of element-wise ones, because only their parts run on a device."""
_ROWS = {"cross_entropy_loss", "nll_loss", "nll_loss_nd"}
"""Operators with a gather that reads a row's own element."""
_PRODUCTS = {"linear", "matmul", "einsum", "bmm", "mm", "addmm", "baddbmm"}
_LINEAR = {"add", "sub", "add_", "sub_", "to", "_to_copy", "clone", "neg", "cat", "contiguous", "stack"}
"""Operators whose backward reads gradients alone."""


def _fuses(node: fx.Node) -> bool:
    """Whether a compiler writes a node into the kernel of its neighbours."""
    target = node.target
    if node.op != "call_function" or getattr(target, "namespace", "") != "aten":
        return False
    name = operator_name(target)
    return name in _ROWS or (name not in _OTHERS and kind_of(target) in (ELEMENTWISE, NORMALISATION))


@define(eq=False)
class Section:
    """A group of nodes that is one kernel.

    Args:
        nodes: in order.
        given: what it reads from outside and no stage computes for itself: roots of nodes.
        results: what others read: roots of nodes → names of these others.
    """

    nodes: list[fx.Node] = field(factory=list)
    given: dict[fx.Node, None] = field(factory=dict)
    results: dict[fx.Node, set[str]] = field(factory=dict)


@frozen(slots=False, eq=False)
class Sections:
    """The sections of a captured step.

    Args:
        operators: the captured step.
        joined: whether products that read the same value are one, as of queries, keys and values, and operators
            outside layers are in sections, too.
    """

    operators: Operators
    joined: bool = False

    @cached_property
    def of_node(self) -> Mapping[fx.Node, Section]:
        """Node → the section that it is in, for nodes that are in one; views are in that of what they show."""
        depth: dict[fx.Node, int] = {}
        found: dict[fx.Node, Section] = {}
        owner = self.operators.owner
        layers = not self.joined and any(map(is_in_layer, self.operators.members))
        order = {node: position for position, node in enumerate(self.operators.step.graph.nodes)}
        for node in order:
            if node.name not in owner:
                continue
            sources = [source for source in node.all_input_nodes if source.name in owner]
            inside = is_view(node) or (_fuses(node) and (is_in_layer(owner[node.name]) or not layers))
            depth[node] = max((depth[source] for source in sources), default=0) + (not inside)
            if not inside:
                continue
            near = [found[s] for s in sources if s in found and depth[s] == depth[node]]
            section = near[0] if near else Section()
            for other in near[1:]:
                if other is not section:
                    found.update(dict.fromkeys(other.nodes, section))
                    section.nodes = sorted([*section.nodes, *other.nodes], key=order.__getitem__)
            section.nodes.append(node)
            found[node] = section
        return found

    @cached_property
    def all(self) -> Sequence[Section]:
        """The sections that run a kernel, with what they read and return."""
        each = dict.fromkeys(self.of_node.values())
        running = [section for section in each if any(map(_computes, section.nodes))]
        for section in running:
            inside = set(section.nodes)
            for node in section.nodes:
                for source in map(root_of, node.all_input_nodes):
                    if source not in inside and source.name not in self.operators.local:
                        section.given[source] = None
                readers = {self._reader(user) for user in node.users if user not in inside}
                if readers and root_of(node) in inside:
                    section.results.setdefault(root_of(node), set()).update(readers)
        return running

    def _reader(self, user: fx.Node) -> str:
        section = self.of_node.get(user)
        if section is not None:
            return section.nodes[0].name
        return "a product" if self.joined and operator_name(user.target) == "linear" else user.name

    def kernels(self, section: Section) -> tuple[Kernel, Kernel | None]:
        """The kernel of a section's forward, and that of its backward; None if it has no backward."""
        values = self.operators.values
        kinds = {kind_of(node.target) for node in section.nodes if _computes(node)}
        kind = NORMALISATION if NORMALISATION in kinds else ELEMENTWISE
        written = sum(_bytes(values[node.name]) for node in section.results)
        forward = Kernel("section", kind, "bf16", 0, 0, self._read(section.given), written)
        back = sum(_bytes(values[node.name]) for node in section.given if _has_gradient(values.get(node.name)))
        if not back:
            return forward, None
        gradients = sum(
            _bytes(values[node.name]) * len(readers)
            for node, readers in section.results.items()
            if _has_gradient(values[node.name])
        )
        sources = set[fx.Node]()
        for node in section.nodes:
            if _computes(node) and operator_name(node.target) not in _LINEAR:
                sources = sources.union(*(self._sources(source, section) for source in node.all_input_nodes))
        return forward, Kernel("section_backward", kind, "bf16", 0, 0, gradients + self._read(sources), back)

    def _read(self, nodes: Iterable[fx.Node]) -> int:
        return sum(_bytes(self.operators.values.get(node.name)) for node in nodes)

    def kernels_of_operators(self, works: Sequence[TracedOperator]) -> list[TracedOperator]:
        """Per operator its work, with the kernels of sections that begin in it in place of its own of their kinds."""
        names = list(self.operators.members)
        place = {name: at for at, name in enumerate(names)}
        inside = [all(node in self.of_node or not _row(node) for node in self._members(name)) for name in names]
        found = [_without_rows(work) if own else work for own, work in zip(inside, works, strict=True)]
        for section in self.all:
            at = place[self.operators.owner[section.nodes[0].name]]
            forward, backward = self.kernels(section)
            more = () if backward is None else (backward,)
            found[at] = evolve(
                found[at], forward=(*found[at].forward, forward), backward_input=(*found[at].backward_input, *more)
            )
        return found

    def _members(self, name: str) -> list[fx.Node]:
        return [self.operators.nodes[member] for member in self.operators.members[name]]

    def saved(self, lone: Sequence[LoneOperator], found: Sequence[Sequence[Storage]]) -> list[list[Storage]]:
        """Per operator what it is the first to save, where sections compute what is within them again.

        Args:
            found: per operator what it is the first to save with a kernel for each operator.
        """
        nodes = self.operators.nodes
        kept: set[str] = set()
        result: list[list[Storage]] = []
        for operator, own in zip(lone, found, strict=True):
            mine: list[Storage] = []
            within = any(node in self.of_node for node in self._members(operator.name))
            for each in own:
                root = nodes.get(each.name or "")
                computed = each.name is None and each.origin is not None and within
                if each.shared or not (computed or root in self.of_node):
                    mine += [] if each.name in kept else [each]
                    kept |= set() if each.name is None else {each.name}
                    continue
                if root is not None:
                    sources = self._sources(root, self.of_node[root])
                else:
                    assert each.origin is not None
                    given = [operator.given[at] for at in (*each.origin.reads, *each.origin.narrow)]
                    sources = set[fx.Node]().union(*(self._sources(n, self.of_node.get(n)) for n in given))
                for source in sorted(sources, key=lambda node: node.name):
                    if source.name not in kept and source.name in self.operators.owner:
                        kept.add(source.name)
                        size = sum(t.untyped_storage().nbytes() for t in tensors_of(self.operators.values[source.name]))
                        mine.append(Storage(source.name, size, shared=False))
            result.append(mine)
        return result

    def _sources(self, node: fx.Node, section: Section | None) -> set[fx.Node]:
        """What a value is computed from in its section: roots that are inputs of it, or that other sections read."""
        found, seen, todo = set[fx.Node](), set[fx.Node](), [node]
        while todo:
            one = root_of(todo.pop())
            if one in seen or one.name in self.operators.local:
                continue
            seen.add(one)
            own = section is not None and self.of_node.get(one) is section
            if not own or any(self._elsewhere(user, section) for user in one.users) or self._multiplied(one):
                found.add(one)
            else:
                todo.extend(one.all_input_nodes)
        return found

    def _multiplied(self, node: fx.Node) -> bool:
        """Whether a product reads a node of a compiled section, so that it is saved: the product's backward would write
        it to memory again (functorch, ``ban_recompute_materialized_backward``)."""
        return not self.joined and any(
            operator_name(user.target) in _PRODUCTS or (is_view(user) and self._multiplied(user)) for user in node.users
        )

    def _elsewhere(self, user: fx.Node, section: Section | None) -> bool:
        """Whether another section computes with a value that this node reads."""
        other = self.of_node.get(user)
        return other is not None and other is not section and _computes(user)


def _computes(node: fx.Node) -> bool:
    """Whether a node of a section runs on the device."""
    return _fuses(node) and not is_view(node)


def _row(node: fx.Node) -> bool:
    """Whether a node's kernels are of the kinds that sections have."""
    return node.op == "call_function" and operator_name(node.target) not in _OTHERS and not is_view(node)


def _bytes(value: object) -> int:
    return sum(map(touched_bytes, tensors_of(value)))


def _has_gradient(value: object) -> bool:
    return any(tensor.requires_grad for tensor in tensors_of(value))


def _without_rows(work: TracedOperator) -> TracedOperator:
    """An operator's work without kernels of the kinds that sections have."""
    parts = {name: getattr(work, name) for name in ("forward", "backward_input", "backward_weight")}
    left: dict[str, Any] = {
        name: tuple(kernel for kernel in own if kernel.kind not in (ELEMENTWISE, NORMALISATION))
        for name, own in parts.items()
    }
    return evolve(work, **left)
