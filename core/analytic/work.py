"""An operator's kernels of F, I and W, and its memory, from a joint graph (forward and backward) of it alone."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from attrs import frozen
from torch import Tensor, fx

from ..capture.export.operators import tensor_bytes
from ..capture.graph.nodes import ancestors, fixed_nodes, root_of
from ..capture.graph.storages import storage_sizes
from ..capture.programs.accumulated_products import products_of
from ..capture.programs.joint_graph import (
    JointGraph,
    closed_over,
    forward_nodes,
    ordered,
    selecting_nodes,
    split_masked,
    trace_joint,
)
from ..capture.programs.overwriting import may_overwrite
from ..capture.programs.recomputed import fusible, is_row_wise, narrows, shown_by, widens
from ..capture.values.nesting import tensors_of
from ..cluster.rank_kinds import EXPERT_RANKS, TENSOR_RANKS
from ..costs.reductions import TensorReductions
from ..tensor_collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from .kernels import Kernel, kernel_of
from .region_work import REGION_OPERATORS, RegionWork, region_work
from .single_operator import LoneOperator, is_copy


@frozen
class Origin:
    """What row-wise operators compute a tensor from.

    Args:
        steps: number of these operators, without views.
        reads: positions of the inputs that they read.
        narrow: positions of those whose elements a wider dtype then has.
    """

    steps: int = 0
    reads: tuple[int, ...] = ()
    narrow: tuple[int, ...] = ()


@frozen
class KeptStorage:
    """A storage that an operator keeps for its backward.

    Args:
        given: if the tensor is an input, its position among the operator's inputs; otherwise None.
        returned: if the tensor is a result, its position among the results; otherwise None.
        bytes: of the storage.
        shared: whether it depends on parameters alone, so that all microbatches share it.
        cast_of: position of the input that it is a cast of to a narrower dtype; None for another tensor.
        origin: what row-wise operators compute it from; None for an input, and if others compute it.
    """

    given: int | None
    returned: int | None
    bytes: int
    shared: bool = False
    cast_of: int | None = None
    origin: Origin | None = None


@frozen
class TracedOperator:
    """An operator's kernels and memory for one microbatch.

    Args:
        forward, backward_input, backward_weight: kernels of F, I and W, in order.
        kept: storages that F keeps for the backward, without parameters, buffers, constants and the batch.
        forward_bytes, backward_bytes: the peak memory of F and of the backward, without their inputs and the kept
            storages.
        exchanges: each exchange with other ranks, without its time.
        row_wise: whether F works element by element or along rows, so that it takes one pass over memory.
        origin: what its results are computed from; None if it is not row-wise.
    """

    forward: tuple[Kernel, ...] = ()
    backward_input: tuple[Kernel, ...] = ()
    backward_weight: tuple[Kernel, ...] = ()
    kept: tuple[KeptStorage, ...] = ()
    forward_bytes: int = 0
    backward_bytes: int = 0
    exchanges: tuple[TensorReductions, ...] = ()
    row_wise: bool = True
    origin: Origin | None = None

    @property
    def has_backward(self) -> bool:
        """Whether a kernel runs in the backward."""
        return bool(self.backward_input or self.backward_weight)

    @property
    def flops(self) -> int:
        """FLOPs of F, I and W for utilisation, see `Kernel.counted_flops`."""
        return sum(k.counted_flops for k in (*self.forward, *self.backward_input, *self.backward_weight))


def work_of(operator: LoneOperator) -> TracedOperator:
    """Trace an operator's forward and backward over fake tensors and collect their kernels.

    Raises:
        RequestError: it cannot be differentiated, or it is a region that does not run on random inputs.
    """
    if _is_view(operator):
        return TracedOperator(origin=Origin(reads=tuple(range(len(operator.given)))))
    joint = trace_joint(operator.graph(), as_on_cpu=False)
    regions = {number: region_work(operator, number) for number in _region_numbers(joint)}
    nodes = _divided(joint, len(operator.activations))
    copies = {node for node in joint.outputs if is_copy(node)}

    def kernels(chosen: set[fx.Node]) -> tuple[Kernel, ...]:
        return tuple(k for node in ordered(joint.graph, chosen - copies) for k in _kernels(node, regions))

    kept = _kept(joint, operator, nodes, regions)
    backward = nodes.backward_input | nodes.backward_weight
    return TracedOperator(
        kernels(nodes.forward), kernels(nodes.backward_input), kernels(nodes.backward_weight), kept.tensors,
        _peak(joint, nodes.forward - copies, kept.storages | kept.given),
        _peak(
            joint, backward, kept.storages | kept.given, _without_memory(joint, backward, len(operator.activations))
        ),
        _exchanges(joint, nodes.forward, backward),
        all(map(is_row_wise, nodes.forward)),
        _origin(joint, list(joint.outputs)),
    )  # fmt: skip


_EXCHANGES: dict[Any, Callable[[int, int], int]] = {
    ALL_REDUCE: lambda read, made: made,
    ALL_GATHER: lambda read, made: made // 2,
    REDUCE_SCATTER: lambda read, made: read // 2,
    ALL_TO_ALL: lambda read, made: made,
}
"""Operators that exchange tensors with other ranks → bytes read and made → bytes that count.

A gather or a scatter counts as an all-reduce of half of the whole tensor, which moves as many bytes."""


def _exchanges(joint: JointGraph, forward: set[fx.Node], backward: set[fx.Node]) -> tuple[TensorReductions, ...]:
    """The exchanges of an operator with tensor ranks, then with expert ranks."""
    found = []
    for node in (*ordered(joint.graph, forward), *ordered(joint.graph, backward)):
        if node.target in _EXCHANGES:
            read, made = (tensor_bytes(each.meta["val"]) for each in (node.all_input_nodes[0], node))
            size, first = _EXCHANGES[node.target](read, made), int(node in forward)
            over = EXPERT_RANKS if node.target is ALL_TO_ALL else TENSOR_RANKS
            found.append(TensorReductions(first, 1 - first, size * first, size * (1 - first), over=over))
    return tuple(sorted(found, key=lambda each: each.over != TENSOR_RANKS))


def _is_view(operator: LoneOperator) -> bool:
    """Whether its results are views of its inputs, and it computes nothing."""
    values = operator.operators.values
    known = storage_sizes(values[node.name] for node in operator.given)
    made = (tensor for node in operator.members for tensor in tensors_of(values[node.name]))
    return all(t.untyped_storage()._cdata in known for t in made) and not any(
        getattr(getattr(node.target, "_schema", None), "is_mutable", False) for node in operator.members
    )


@frozen
class _Nodes:
    """Nodes of a joint graph by the program that runs them."""

    forward: set[fx.Node]
    backward_input: set[fx.Node]
    backward_weight: set[fx.Node]


def _divided(joint: JointGraph, activations: int) -> _Nodes:
    """The nodes of F, I and W, divided as `..capture.programs` does."""
    forward = forward_nodes(joint)
    towards = {i: node for i, node in joint.gradients.items() if i < activations}
    if towards:
        split_masked(joint.graph, ancestors(towards.values()))
    inputs = ancestors(towards.values()) - forward
    for node in joint.gradients.values():
        inputs |= (selecting_nodes(node, forward | inputs) or set()) if towards else set()
    weights = ancestors(joint.gradients.values()) - forward - inputs
    return _Nodes(forward, inputs, weights)


def _region_numbers(joint: JointGraph) -> set[int]:
    """Numbers of the regions that a joint graph runs."""
    return {_number(n, 1) for n in joint.graph.nodes if n.target is REGION_OPERATORS[0]}


def _number(node: fx.Node, position: int) -> int:
    number = node.args[position]
    assert isinstance(number, int)
    return number


def _kernels(node: fx.Node, regions: dict[int, RegionWork]) -> Sequence[Kernel]:
    if node.op != "call_function" or not hasattr(node.target, "_schema"):
        return ()
    if node.target is REGION_OPERATORS[0]:
        return regions[_number(node, 1)].forward
    if node.target is REGION_OPERATORS[1]:
        return regions[_number(node, 2)].backward
    if node.target in _EXCHANGES:  # its time is that of the links
        return ()
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    found = kernel_of(node.target, args, kwargs, node.meta.get("val"))
    return () if found is None else (found,)


@frozen
class _KeptStorages:
    """The kept tensors, and the identities of their storages and of the inputs' storages."""

    tensors: tuple[KeptStorage, ...]
    storages: frozenset[int]
    given: frozenset[int]


def _kept(joint: JointGraph, operator: LoneOperator, nodes: _Nodes, regions: dict[int, RegionWork]) -> _KeptStorages:
    backward = nodes.backward_input | nodes.backward_weight
    reads = closed_over(ordered(joint.graph, backward), backward)
    reads += [node for node in joint.gradients.values() if node not in backward]
    tangents = storage_sizes(node.meta["val"] for node in joint.tangents.values())
    given: dict[int, int] = {}
    for position, node in joint.primals.items():
        given.setdefault(_storage(node), position)
    returned: dict[int, int] = {}
    for position, node in enumerate(joint.outputs):
        shown = node.all_input_nodes[0] if is_copy(node) else node
        returned.setdefault(_storage(shown), position)
    fixed = {joint.primals[i] for i, yes in enumerate(operator.fixed) if yes}
    shared = fixed.union(fixed_nodes(joint.graph, dict.fromkeys(fixed), ()))
    found: dict[int, KeptStorage] = {}
    for node in reads:
        for key, size in storage_sizes(_tensors(node)).items():
            if key in tangents or key in found:
                continue
            place = given.get(key)
            if place is not None and place < len(operator.activations):
                whole = operator.operators.values[operator.given[place].name].untyped_storage().nbytes()
                found[key] = KeptStorage(place, None, whole, node in shared)
            elif place is not None and not _is_local(operator, place):
                continue
            else:
                output = None if place is not None else returned.get(key)
                origin = None if place is not None else _origin(joint, [node])
                found[key] = KeptStorage(place, output, size, node in shared, _cast_of(node, joint), origin)
    tensors = [*found.values(), *(KeptStorage(None, None, work.kept_bytes) for work in regions.values())]
    return _KeptStorages(tuple(tensors), frozenset(found) | frozenset(tangents), frozenset(given))


def _cast_of(node: fx.Node, joint: JointGraph) -> int | None:
    """The position of the input that a node is a cast of to a narrower dtype, if any."""
    root = shown_by(node)
    if not narrows(root):
        return None
    source = shown_by(root.all_input_nodes[0])
    return next((position for position, given in joint.primals.items() if given is source), None)


def _origin(joint: JointGraph, results: Sequence[fx.Node]) -> Origin | None:
    """What these nodes are computed from; None if operators that are not row-wise are needed."""
    place = {node: position for position, node in joint.primals.items()}
    seen, reads, narrow = set[fx.Node](), set[int](), set[int]()
    todo = list(results)
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        if node in place:
            reads.add(place[node])
            continue
        if is_copy(node):  # of a result, for its gradient
            todo.extend(node.all_input_nodes)
            continue
        if not is_row_wise(node):
            return None
        seen.add(node)
        given = shown_by(node.all_input_nodes[0]) if widens(node) else None
        if given in place:
            narrow.add(place[given])
        else:
            todo.extend(node.all_input_nodes)
    return Origin(sum(map(fusible, seen)), tuple(sorted(reads)), tuple(sorted(narrow)))


def _is_local(operator: LoneOperator, place: int) -> bool:
    """Whether an input is a tensor that every stage computes for itself; the last input may be the random key."""
    return place < len(operator.given) and root_of(operator.given[place]).name in operator.operators.local


def _tensors(node: fx.Node) -> list[Tensor]:
    """The fake tensors among a node's results."""
    return tensors_of(node.meta.get("val"))


def _storage(node: fx.Node) -> int:
    return int(node.meta["val"].untyped_storage()._cdata)


def _without_memory(joint: JointGraph, backward: set[fx.Node], activations: int) -> set[fx.Node]:
    """Nodes of the backward that allocate no memory.

    They overwrite the incoming gradient, if nothing else reads it, or are parameter gradients that a product adds to an
    existing one.
    """
    tangents = set(joint.tangents.values())
    found = set()
    for node in backward:
        gradients = [source for source in node.all_input_nodes if source in tangents and may_overwrite(node, source)]
        if any(sum(user in backward for user in source.users) == 1 for source in gradients):
            found.add(node)
    own = [node for position, node in joint.gradients.items() if position >= activations]
    returned = [node for position, node in joint.gradients.items() if position < activations]
    for product in products_of(own, backward, returned):
        found |= {product.node, *product.flips}
    return found


def _peak(
    joint: JointGraph, chosen: set[fx.Node], ignored: frozenset[int], without_memory: Collection[fx.Node] = ()
) -> int:
    """The peak bytes of storages while nodes run in order; each is alive from its first tensor to its last use."""
    ignored |= {key for node in without_memory for key in storage_sizes(_tensors(node))}
    order = ordered(joint.graph, chosen)
    sizes: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, node in enumerate(order):
        own = {key: size for key, size in storage_sizes(_tensors(node)).items() if key not in ignored}
        sizes = {**own, **sizes}
        read = {key for source in node.all_input_nodes for key in storage_sizes(_tensors(source))}
        last.update(dict.fromkeys((read | own.keys()) & sizes.keys(), position))
    outside = {source for node in joint.graph.nodes if node not in chosen for source in node.all_input_nodes}
    last.update({key: len(order) for node in outside & chosen for key in storage_sizes(_tensors(node)) if key in sizes})
    ends: dict[int, int] = {}
    for key, position in last.items():
        ends[position] = ends.get(position, 0) + sizes[key]
    alive, peak, seen = 0, 0, set[int]()
    for position, node in enumerate(order):
        new = {key for key in storage_sizes(_tensors(node)) if key in sizes} - seen
        seen |= new
        alive += sum(sizes[key] for key in new)
        peak = max(peak, alive)
        alive -= ends.get(position, 0)
    return peak
