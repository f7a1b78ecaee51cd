"""Whether arguments of a graph of Dynamo's may be cut along dimension 0, by the rule of ``panpipe.pipeline``.

The graph runs on fake tensors with another number of samples; see `find_batch_dims`.

Values, writes and costs of the nodes are found on fake tensors: without computation or memory.
"""

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from attrs import evolve, field, frozen
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ...core.capture.batch.batch_dims import BatchDims
from ...core.capture.batch.find_batch_dims import find_batch_dims
from ...core.capture.graph.nodes import written_tensors
from ...core.capture.graph.randomness import KeyedRandom, random_key
from ...core.errors import RequestError


class SampleCheck:
    """Refuses graphs whose samples cannot be cut.

    Args:
        graph: as Dynamo gives it; what is known of its arguments is read now.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        self._graph = graph
        examples = [node.meta.get("example_value") for node in graph.graph.nodes if node.op == "placeholder"]
        self._numbers = [str(one) if isinstance(one, torch.SymInt) else None for one in examples]
        self._sizes = {
            (place, dim): str(size)
            for place, one in enumerate(examples)
            if isinstance(one, Tensor)
            for dim, size in enumerate(one.shape)
            if isinstance(size, torch.SymInt)
        }

    def numbers(self, batched: Set[int]) -> set[int]:
        """Positions of the arguments that are the size of the batch, by Dynamo's names of sizes.

        Args:
            batched: positions of the tensors that have samples.
        """
        sizes = {self._sizes.get((place, 0)) for place in batched} - {None}
        return {place for place, name in enumerate(self._numbers) if name in sizes}

    def refuse(
        self, arguments: Sequence[Any], names: Mapping[int, str], given: Mapping[str, int | None], microbatches: int
    ) -> None:
        """Refuse a graph that cannot run on fewer samples, or that relates them, such as a recurrence.

        Args:
            arguments: what the graph is called with.
            names: place → name, of the tensors of the user's batch.
            given: the user's ``batch_dims``: 0, or None for an argument that all microbatches share.

        Raises:
            RequestError: it does.
        """

        def step(held: Any, batch: Mapping[str, Tensor]) -> Any:
            sizes = self._sizes_in(arguments, names, batch)

            def value(place: int, argument: Any) -> Any:
                if place in names:
                    return batch[names[place]]
                if isinstance(argument, Tensor):
                    return getattr(held, f"argument_{place}")
                return sizes.get(self._numbers[place], argument)

            return held.graph(*map(value, range(len(arguments)), arguments))

        batch = {name: arguments[place].detach() for place, name in names.items()}
        # Other arguments than the first one's rows, such as masks, are shared; the backend decides by the same sizes.
        rows = next((batch[name] for name, dim in given.items() if dim == 0 and name in batch), None)
        samples = len(next(iter(batch.values())) if rows is None else rows)
        others = {name: None for name, tensor in batch.items() if len(tensor) != samples}
        known = BatchDims.of({_leaf(name): dim for name, dim in (others | dict(given)).items() if name in batch})
        model = _Held(self._graph, {p: a for p, a in enumerate(arguments) if isinstance(a, Tensor) and p not in names})
        try:
            find_batch_dims(model, step, batch, given=known, microbatches=microbatches)
        except RequestError as error:
            text = str(error).partition("; give batch_dims=")[0]
            for name in batch:
                text = text.replace(_leaf(name), f"argument '{name}'")
            raise RequestError(
                f"{text}; state which is meant with options={{'batch_dims': ...}}: by the arguments' names, 0, or None "
                "for what all microbatches share"
            ) from error

    def _sizes_in(
        self, arguments: Sequence[Any], names: Mapping[int, str], batch: Mapping[str, Tensor]
    ) -> dict[str | None, int]:
        """Dynamo's name of a size → what it is in a batch; of the tensors that share a name, one that has changed."""
        found: dict[str | None, int] = {}
        for (place, dim), name in self._sizes.items():
            if place in names:
                size = batch[names[place]].shape[dim]
                if name not in found or size != arguments[place].shape[dim]:
                    found[name] = size
        return found


class _Held(nn.Module):
    """A graph, and what it is given in addition to the user's batch: parameters, buffers, globals.

    Args:
        tensors: by position of the argument.
    """

    def __init__(self, graph: fx.GraphModule, tensors: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.graph = graph
        for place, tensor in tensors.items():
            self.register_buffer(f"argument_{place}", tensor.detach())


def _leaf(name: str) -> str:
    return f"batch['{name}']"


@frozen
class NodeInfo:
    """One node.

    Args:
        several: whether its value is a tuple or list with tensors.
        written: addresses of storages that the node writes in place.
        draws: number of random operators that it runs.
        flops: floating-point operations, as ``FlopCounterMode`` counts them.
    """

    tensor: bool = False
    several: bool = False
    shape: tuple[int, ...] = ()
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
                info, tensor=True, shape=tuple(value.shape), differentiable=value.requires_grad,
                storage=value.untyped_storage()._cdata, bytes=value.nbytes,
            )  # fmt: skip
        self.nodes[n] = info
        return value


def node_info(
    graph: fx.GraphModule, arguments: Sequence[Any], shapes: Mapping[int, tuple[int, ...]]
) -> dict[fx.Node, NodeInfo]:
    """Run a graph on fake tensors.

    Args:
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
