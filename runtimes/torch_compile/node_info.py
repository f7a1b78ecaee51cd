"""The value, writes and costs of every node of a graph, found on fake tensors: without computation or memory."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import evolve, field, frozen
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ...core.capture.graph.nodes import written_tensors
from ...core.capture.graph.randomness import KeyedRandom, random_key


@frozen
class NodeInfo:
    """One node.

    Args:
        tensor: whether its value is a tensor.
        several: whether its value is a tuple or list with tensors.
        shape, dtype, differentiable: of the tensor.
        storage: address of the tensor's storage.
        written: addresses of storages that the node writes in place.
        draws: number of random operators that it runs.
        flops: floating-point operations, as ``FlopCounterMode`` counts them.
        bytes: of its value.
    """

    tensor: bool = False
    several: bool = False
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    differentiable: bool = False
    storage: int = 0
    written: frozenset[int] = field(factory=frozenset)
    draws: int = 0
    flops: int = 0
    bytes: int = 0


class _Writes(TorchDispatchMode):
    """Records the storages that operators write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        self.found.update(tensor.untyped_storage()._cdata for tensor in written_tensors(func, args, named))
        return func(*args, **named)


class _Recorder(fx.Interpreter):
    def __init__(self, graph: fx.GraphModule, writes: _Writes, random: KeyedRandom, flops: FlopCounterMode) -> None:
        super().__init__(graph)
        self._writes, self._random, self._flops = writes, random, flops
        self.nodes: dict[fx.Node, NodeInfo] = {}

    def run_node(self, n: fx.Node) -> Any:
        self._writes.found.clear()
        draws, flops = self._random.ordinal, self._flops.get_total_flops()
        value = super().run_node(n)
        info = NodeInfo(
            written=frozenset(self._writes.found),
            draws=self._random.ordinal - draws,
            flops=self._flops.get_total_flops() - flops,
            several=isinstance(value, tuple | list) and any(isinstance(one, Tensor) for one in value),
        )
        if isinstance(value, Tensor):
            info = evolve(
                info, tensor=True, shape=tuple(value.shape), dtype=value.dtype, differentiable=value.requires_grad,
                storage=value.untyped_storage()._cdata, bytes=value.nbytes,
            )  # fmt: skip
        self.nodes[n] = info
        return value


def node_info(
    graph: fx.GraphModule, arguments: Sequence[Any], shapes: Mapping[int, tuple[int, ...]]
) -> dict[fx.Node, NodeInfo]:
    """Run a graph on fake tensors.

    Args:
        graph: the graph.
        arguments: values of its placeholders.
        shapes: position of an argument → the shape that it has instead.

    Raises:
        Exception: an operator does not support these shapes.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[int, Tensor] = {}

    def fake(place: int, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        shape = shapes.get(place, tuple(value.shape))
        if not value.ndim and not value.requires_grad and value.device.type == "cpu":
            # Dynamo passes numbers of modules, such as an epsilon, as tensors, and the graph reads the number.
            return torch.tensor(numbers[place], dtype=value.dtype)
        if id(value) not in fakes:  # a tensor that is passed twice stays one tensor
            fakes[id(value)] = torch.empty(shape, dtype=value.dtype, device=value.device)
            fakes[id(value)].requires_grad_(value.requires_grad)
        return fakes[id(value)]

    numbers = {p: v.item() for p, v in enumerate(arguments) if isinstance(v, Tensor) and not v.ndim and v.is_cpu}
    random = KeyedRandom(random_key(0, 0, 0))
    writes, flops = _Writes(), FlopCounterMode(display=False)
    with mode, torch.enable_grad():
        values = [fake(place, value) for place, value in enumerate(arguments)]
        held = [value.view_as(value) if value.requires_grad else value for value in values if isinstance(value, Tensor)]
        views = iter(held)  # a leaf that requires a gradient may not be written; the model's own input may
        values = [next(views) if isinstance(value, Tensor) else value for value in values]
        with flops, random, writes:
            recorder = _Recorder(graph, writes, random, flops)
            recorder.run(*values)
    return recorder.nodes


def tensors_of(node: fx.Node) -> list[Any]:
    """The values that an output node returns."""
    leaves: list[Any] = pytree.tree_leaves(node.args[0], is_leaf=lambda value: isinstance(value, fx.Node))
    return leaves
