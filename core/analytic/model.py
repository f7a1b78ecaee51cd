"""The kernels of a whole training step, operator by operator, and from them the costs on any type of device."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from ..capture.export.operators import Operators, tensor_bytes
from ..capture.graph.nodes import root_of
from ..cluster.device_type import DeviceType
from ..costs.graph import OpGraph, OpNode
from ..costs.layers import is_in_layer
from ..costs.reductions import TensorReductions, sum_of
from ..errors import RequestError
from ..tensor_collectives import ALL_GATHER
from .attention import written_out_cores
from .fusion import Sections
from .kernels import Kernel
from .kinds import ATTENTION, COMPILED, EAGER, FUSED
from .optimizers import DEFAULT, Optimizer, find_optimizer
from .roofline import FP8, kernels_s
from .saved_storages import Storage, saved_storages
from .single_operator import LoneOperator
from .work import TracedOperator, work_of


@frozen
class OperatorWork:
    """One operator of a step.

    Args:
        work: its own kernels and memory; equal operators share one object.
        backward_input, backward_weight: kernels that the step adds to I and W: they sum the gradients of a result that
            several operators read, and a parameter's gradient over microbatches.
        saved_bytes: bytes of saved tensors that no earlier operator saves, for each microbatch.
        shared_bytes: bytes of those that all microbatches share.
        workspace_bytes: peak bytes while it runs, without state and saved tensors.
        state: the parameters that it is the first to read.
    """

    work: TracedOperator
    backward_input: tuple[Kernel, ...]
    backward_weight: tuple[Kernel, ...]
    saved_bytes: int
    shared_bytes: int
    workspace_bytes: int
    state: "ParameterState"


@frozen(eq=False)
class ModelWork:
    """A training step's kernels and memory for one microbatch.

    Args:
        graph: its operators, without times.
        operators: the work of each, in the graph's order.
        kernels: how these are written, see `fusion`.
    """

    graph: OpGraph
    operators: tuple[OperatorWork, ...]
    kernels: str = EAGER

    @property
    def flops(self) -> int:
        """FLOPs of F, I and W by the usual formulas for utilisation."""
        return sum(operator.work.flops for operator in self.operators)

    @property
    def number_type(self) -> str:
        """The number type of most of these FLOPs."""
        counts: Counter[str] = Counter()
        for operator in self.operators:
            for kernel in (*operator.work.forward, *operator.work.backward_input, *operator.work.backward_weight):
                counts[kernel.dtype] += kernel.counted_flops
        return max(counts, key=lambda name: counts[name], default="fp32")

    def on(self, device: DeviceType, *, optimizer: Optimizer | None = None, products: str = "") -> OpGraph:
        """The operator graph with times on a type of device, and the memory that each operator needs.

        Args:
            device: the type of device.
            optimizer: it determines the state's size; Adam in float32 if None.
            products: number type in which products run, see `roofline`; FP8 is for the parameters of layers, not for
                attention, embeddings and the head, as in Transformer Engine.

        Raises:
            RequestError: the device states no rate for a number type of the model.
        """
        if self.kernels == FUSED and device.fused_attention_efficiency is not None:
            rates = {**device.efficiency, ATTENTION: device.fused_attention_efficiency}
            device = evolve(device, efficiency=rates)
        found: dict[tuple[int, str], tuple[float, ...]] = {}

        def times(node: OpNode, work: TracedOperator) -> tuple[float, ...]:
            """Seconds of F, I and W; equal operators are timed once."""
            own = products if products != FP8 or (node.parameters and is_in_layer(node.name)) else ""
            if (id(work), own) not in found:
                parts = (work.forward, work.backward_input, work.backward_weight)
                found[id(work), own] = tuple(kernels_s(part, device, own) for part in parts)
            return found[id(work), own]

        chosen = optimizer or find_optimizer(DEFAULT)
        bandwidth = device.peak_memory_bytes_per_s * device.efficiency["elementwise"]
        nodes = []
        for node, operator in zip(self.graph.nodes, self.operators, strict=True):
            forward, inputs, weights = times(node, operator.work)
            nodes.append(
                evolve(
                    node,
                    forward_s=forward,
                    backward_input_s=inputs + kernels_s(operator.backward_input, device),
                    backward_weight_s=weights + kernels_s(operator.backward_weight, device),
                    optimizer_s=sum(n * chosen.moved_bytes(size) for n, size in operator.state.trained) / bandwidth,
                    **operator.state.bytes_of(chosen),
                    saved_bytes=operator.saved_bytes,
                    shared_bytes=operator.shared_bytes,
                    workspace_bytes=operator.workspace_bytes,
                    reductions=sum_of(operator.work.exchanges),
                )
            )
        return evolve(self.graph, nodes=tuple(nodes))


def costs_by_type(
    work: ModelWork, devices: Iterable[DeviceType], *, optimizer: Optimizer | None = None, products: str = ""
) -> dict[str, OpGraph]:
    """Graphs with times, by the name of each type of device, for a cluster of several types."""
    return {device.name: work.on(device, optimizer=optimizer, products=products) for device in devices}


def model_work(
    operators: Operators, kernels: str = EAGER, *, gathers_again: bool = False, attends_again: bool = False
) -> ModelWork:
    """The work of every operator of a captured step; equal operators are traced once.

    Args:
        operators: of the captured step.
        kernels: how they are written, see `fusion`.
        gathers_again: whether tensor ranks save their part of a gathered tensor, which the backward gathers again, as
            Megatron-LM does (arXiv 2205.05198, section 4.2.2).
        attends_again: whether the backward computes the core of attention again, see `written_out_cores`.

    Raises:
        RequestError: an operator cannot be differentiated, Python code does not run on random inputs, or there is no
            core to compute again.
    """
    lone, works = _works(operators)
    sections = None if kernels == EAGER else Sections(operators, joined=kernels == FUSED)
    # The head and the loss next to compiled layers are PyTorch's own.
    plain = [each.name for each in lone if kernels == COMPILED and not is_in_layer(each.name)]
    storages = saved_storages(lone, works, plain)
    if sections is not None:
        storages = sections.saved(lone, storages)
    if gathers_again:
        storages, works = _gathered_again(operators, storages, works)
    again = written_out_cores(operators) if attends_again else []
    if attends_again and not again:
        raise RequestError(
            "--recompute attention: no attention of the model is written out as products and a softmax, and a kernel "
            'that does all of it saves no scores: leave it out (a config.json has "attn_implementation": "eager")'
        )
    core = [any(name in each for each in again for name in names) for names in operators.members.values()]
    storages, dropped = _without_cores(operators, storages, again)
    saved, shared, kept = _bytes_of(storages)
    workspace = _workspace(operators, lone, works, kept, dropped)
    if sections is not None:
        works = sections.kernels_of_operators(works)
    values, states = _parameter_values(operators), _states(operators)
    found = [
        OperatorWork(
            work, (*_gradient_sums(operators, operator, sections), *(work.forward if core[i] else ())),
            () if kernels == FUSED else _parameter_sums(values, node), saved[i], shared[i], workspace[i], states[i],
        )
        for i, (node, operator, work) in enumerate(zip(operators.graph.nodes, lone, works, strict=True))
    ]  # fmt: skip
    return ModelWork(operators.graph, tuple(found), kernels)


def tensor_reductions(operators: Operators) -> dict[str, TensorReductions | None]:
    """Per operator its all-reduces over tensor ranks, without times; None for one that has none.

    Raises:
        RequestError: as of `model_work`.
    """
    lone, works = _works(operators)
    return {operator.name: sum_of(work.exchanges) for operator, work in zip(lone, works, strict=True)}


def saved_values(operators: Operators) -> dict[str, tuple[str | None, ...]]:
    """Per operator the values that it is the first to save, which its ``saved_bytes`` counts.

    Values are named by the nodes that allocate them; None for a value that no other operator receives.

    Raises:
        RequestError: as of `model_work`.
    """
    lone, works = _works(operators)
    return {
        operator.name: tuple(each.name for each in found if not each.shared)
        for operator, found in zip(lone, saved_storages(lone, works), strict=True)
    }


def _works(operators: Operators) -> tuple[list[LoneOperator], list[TracedOperator]]:
    """Every operator by itself, and its work; equal operators are traced once."""
    lone = [LoneOperator(operators, node.name) for node in operators.graph.nodes]
    known: dict[Hashable, TracedOperator] = {}
    for operator in lone:
        if operator.key not in known:
            known[operator.key] = work_of(operator)
    return lone, [known[operator.key] for operator in lone]


def _bytes_of(found: list[list[Storage]]) -> tuple[list[int], list[int], set[str]]:
    """Per operator the bytes that it is the first to save, and the nodes whose storages are saved.

    Bytes are counted separately for each microbatch, and for all microbatches together.
    """
    names = {each.name for own in found for each in own if each.name is not None}
    split, once = (
        [sum(each.bytes for each in own if each.shared is wanted) for own in found] for wanted in (False, True)
    )
    return split, once, names


def _gathered_again(
    operators: Operators, found: list[list[Storage]], works: list[TracedOperator]
) -> tuple[list[list[Storage]], list[TracedOperator]]:
    """The storages with each rank's part in place of gathered tensors, and the work with the additional gathers."""
    kept = {each.name for own in found for each in own}
    names = list(operators.members)
    place = {name: at for at, name in enumerate(names)}
    changed, more = [], list(works)
    for own in found:
        mine: list[Storage] = []
        for each in own:
            node = operators.nodes.get(each.name or "")
            if node is None or node.target is not ALL_GATHER:
                mine.append(each)
                continue
            part = root_of(node.all_input_nodes[0])
            at = place[operators.owner[node.name]]
            again = TensorReductions(backward=1, backward_bytes=each.bytes // 2)
            more[at] = evolve(more[at], exchanges=(*more[at].exchanges, again))
            if part.name not in kept:
                kept.add(part.name)
                mine.append(Storage(part.name, operators.values[part.name].untyped_storage().nbytes(), each.shared))
        changed.append(mine)
    return changed, more


def _without_cores(
    operators: Operators, found: list[list[Storage]], cores: Sequence[tuple[str, ...]]
) -> tuple[list[list[Storage]], list[int]]:
    """The storages without those of cores of attention, and per operator the bytes that its core holds again."""
    of_node = {name: number for number, core in enumerate(cores) for name in core}
    numbers = [next((of_node[name] for name in names if name in of_node), None) for names in operators.members.values()]
    products = {operators.owner[core[0]] for core in cores}  # what else these save are copies of queries and keys
    left: list[list[Storage]] = []
    held = [0] * len(cores)
    for name, own, number in zip(operators.members, found, numbers, strict=True):
        inner = None if name in products else number
        places = [of_node.get(each.name) if each.name is not None else inner for each in own]
        places = [None if each.shared else place for each, place in zip(own, places, strict=True)]
        left.append([each for each, place in zip(own, places, strict=True) if place is None])
        for each, place in zip(own, places, strict=True):
            if place is not None:
                held[place] += each.bytes
    return left, [0 if number is None else held[number] for number in numbers]


def _workspace(
    operators: Operators, lone: list[LoneOperator], works: list[TracedOperator], kept: set[str], again: list[int]
) -> list[int]:
    """The peak bytes in F or in the backward at each operator, without saved tensors.

    A result that is not saved lives from its operator to its last reader; its gradient from there back to the operator.
    ``again``: bytes that the backward of each operator computes again.
    """
    count = len(lone)
    position = {operator.name: i for i, operator in enumerate(lone)}
    forward, backward = [0] * (count + 1), [0] * (count + 1)
    for i, operator in enumerate(lone):
        seen: set[str] = set()
        for node in operator.returned:
            value = operators.values[node.name]
            readers = [position[operators.owner[u.name]] for u in node.users if u.name in operators.owner]
            end = max(readers, default=i)
            root = root_of(node).name
            if root not in kept and root not in seen and root in operators.owner:
                forward[min(i + 1, count)] += value.untyped_storage().nbytes()
                forward[end + 1 if end > i else min(i + 1, count)] -= value.untyped_storage().nbytes()
            if value.requires_grad:
                backward[i] += tensor_bytes(value)
                backward[max(end, i)] -= tensor_bytes(value)
            seen.add(root)
    alive, flowing = list(accumulate(forward)), list(accumulate(backward))
    return [
        max(work.forward_bytes + alive[i], work.backward_bytes + flowing[i] + again[i] if work.has_backward else 0)
        for i, work in enumerate(works)
    ]


def _gradient_sums(operators: Operators, operator: LoneOperator, sections: Sections | None) -> tuple[Kernel, ...]:
    """A result that n operators read has n gradients; n − 1 additions sum them, or the section that computes it."""
    found: list[Kernel] = []
    for node in operator.returned:
        if sections is not None and root_of(node) in sections.of_node:
            continue
        value = operators.values[node.name]
        readers = {operators.owner[user.name] for user in node.users if user.name in operators.owner} - {operator.name}
        if value.requires_grad:
            found += [addition(value.numel(), value.dtype)] * (len(readers) - 1)
    return tuple(found)


def _parameter_sums(values: Mapping[str, Tensor], node: OpNode) -> tuple[Kernel, ...]:
    """Every parameter's gradient is added to that of the earlier microbatches."""
    return tuple(
        addition(values[name].numel(), values[name].dtype) for name in node.parameters if values[name].requires_grad
    )


def addition(elements: int, dtype: torch.dtype) -> Kernel:
    """The kernel that adds one gradient to another, in place."""
    size = elements * dtype.itemsize
    return Kernel("add_", "elementwise", "fp32", 0, 0, 2 * size, size)


@frozen
class ParameterState:
    """Parameters, whose optimizer is not known yet.

    Args:
        trained: elements and bytes per element of each trained one.
        frozen_bytes: of the others.
    """

    trained: tuple[tuple[int, int], ...]
    frozen_bytes: int

    def bytes_of(self, optimizer: Optimizer) -> dict[str, Any]:
        """The fields of an ``OpNode`` that depend on the optimizer."""
        trained = sum(count * size for count, size in self.trained) if self.frozen_bytes else None
        whole = sum(count * optimizer.state_bytes(size) for count, size in self.trained) + self.frozen_bytes
        return {"state_bytes": whole, "trained_bytes": trained}


def _states(operators: Operators) -> list[ParameterState]:
    """Per operator the parameters that it is the first to read."""
    values, seen, found = _parameter_values(operators), set[str](), []
    for node in operators.graph.nodes:
        own = [values[name] for name in node.parameters if name not in seen]
        seen.update(node.parameters)
        trained = tuple((prod(t.shape), t.dtype.itemsize) for t in own if t.requires_grad)
        found.append(ParameterState(trained, sum(tensor_bytes(t) for t in own if not t.requires_grad)))
    return found


def with_state(graph: OpGraph, operators: Operators, optimizer: Optimizer) -> OpGraph:
    """A graph with other times, such as measured ones, with the state of an optimizer added."""
    states = zip(graph.nodes, _states(operators), strict=True)
    return evolve(graph, nodes=tuple(evolve(node, **state.bytes_of(optimizer)) for node, state in states))


def _parameter_values(operators: Operators) -> Mapping[str, Tensor]:
    """Name of a parameter → its fake tensor."""
    return {name: operators.values[placeholder] for placeholder, name in operators.step.parameters.items()}
