"""Which arguments of a graph of Dynamo's hold the samples, along dimension 0: by the rule of ``panpipe.pipeline``.

The graph runs on fake tensors with another number of samples; see `find_batch_dims`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...core.capture.batch.batch_dims import BatchDims
from ...core.capture.batch.find_batch_dims import find_batch_dims
from ...core.errors import RequestError

FIX = (
    "state which is meant with options={'batch_dims': ...}: by the arguments' names, 0, or None for what all "
    "microbatches share"
)
"""What a user can do where tracing leaves a doubt."""


class SampleSearch:
    """Finds the samples among the arguments of a graph.

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

    def find(
        self, arguments: Sequence[Any], names: Mapping[int, str], given: Mapping[str, int | None], microbatches: int
    ) -> set[int]:
        """The places of the arguments that hold samples.

        Args:
            arguments: what the graph is called with.
            names: place → name, of the tensors of the user's batch.
            given: the user's ``batch_dims``: 0, or None for an argument that all microbatches share.
            microbatches: into how many the batch is cut.

        Raises:
            RequestError: a doubt remains, or they are not along dimension 0.
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
            dims = find_batch_dims(model, step, batch, given=known, microbatches=microbatches)
        except RequestError as error:
            text = str(error).partition("; give batch_dims=")[0]
            for name in batch:
                text = text.replace(_leaf(name), f"argument '{name}'")
            raise RequestError(f"{text}; {FIX}") from error
        found = {place: dims.by_name.get(_leaf(name)) for place, name in names.items()}
        other = next((place for place, dim in found.items() if dim), None)
        if other is not None:
            raise RequestError(
                f"argument '{names[other]}' has its samples along dimension {found[other]}, and a compiled model is "
                f"cut along dimension 0: move them there, or {FIX}; panpipe.pipeline cuts any dimension"
            )
        return {place for place, dim in found.items() if dim == 0}

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
        graph: the graph.
        tensors: by position of the argument.
    """

    def __init__(self, graph: fx.GraphModule, tensors: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.graph = graph
        for place, tensor in tensors.items():
            self.register_buffer(f"argument_{place}", tensor.detach())


def _leaf(name: str) -> str:
    return f"batch['{name}']"
