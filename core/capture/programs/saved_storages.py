"""The storages of a stage's saved tensors: what each is called, how large it is, and what else holds it.

Offload copies storages and not tensors: two views of one storage are one copy, and the storage is freed only when no
view of it is held. The list is the same for every microbatch of a shape.
"""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from attrs import frozen
from torch import Tensor, fx

from ...tensor_metadata import storage_of
from ..graph.storages import storage_sizes
from ..regions.regions import runs_region
from .joint_graph import CAPTURED
from .stage import StageInputs


@frozen
class SavedStorage:
    """A storage of a stage's saved tensors.

    Args:
        name: of the captured value that allocates it; ``name:1`` for the second storage of one value, and so on.
        origin: that value; None where the trace does not know it.
        bytes: its size for a microbatch of this shape.
        places: positions of its views among the saved tensors.
        boundary: whether an earlier stage sent it.
        held: what else holds it after F, so that a copy to the host would not free it; empty if nothing does.
    """

    name: str
    origin: str | None
    bytes: int
    places: tuple[int, ...]
    boundary: bool = False
    held: str = ""


def saved_storages(
    nodes: Sequence[fx.Node],
    values: Sequence[Any],
    inputs: StageInputs,
    given: Sequence[Any],
    outputs: Iterable[Any],
    read_by_python: Iterable[Any],
) -> tuple[SavedStorage, ...]:
    """The storages of saved tensors; parameters, buffers, constants, the batch and random keys are not among them.

    Args:
        nodes: the joint graph's nodes that F saves.
        values: their fake tensors, from one run of F.
        inputs: what the stage reads.
        given: the fake tensors of its inputs in that run.
        outputs: what F returned for other stages and for the step's result.
        read_by_python: what regions (Python code) read.
    """
    boundary = {storage_of(value): each.name for value, each in zip(given, inputs.boundary, strict=False)}
    persistent = storage_sizes(given[len(inputs.boundary) :])
    sent, read = storage_sizes(outputs), storage_sizes(read_by_python)
    found: dict[int, list[int]] = {}
    for place, value in enumerate(values):
        key = storage_of(value) if isinstance(value, Tensor) else None
        if key is not None and key not in persistent:
            found.setdefault(key, []).append(place)
    names: dict[str, int] = {}
    result = []
    for key, places in found.items():
        origin = boundary.get(key) or nodes[places[0]].meta.get(CAPTURED)
        name = origin or nodes[places[0]].name
        number = names[name] = names.get(name, -1) + 1
        held = "the stage sends it on, or returns it" if key in sent else ""
        if key in read or any(_made_by_python(nodes[place]) for place in places):
            held = "code that stays Python holds it for its backward"
        size = values[places[0]].untyped_storage().nbytes()
        called = f"{name}:{number}" if number else name
        result.append(SavedStorage(called, origin, size, tuple(places), key in boundary, held))
    return tuple(result)


def python_reads(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The nodes whose values regions (Python code) among these nodes read."""
    reads = (each for node in nodes if runs_region(node) for each in node.all_input_nodes)
    return list(dict.fromkeys(reads))


def _made_by_python(node: fx.Node) -> bool:
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and runs_region(source)
