"""The classes of a stage's programs: F, B, I, W and the recomputation, with their inputs, outputs and memory.

Saved tensors are listed by storage: what each is called, how large it is, and what else holds it. Offload copies
storages and not tensors: two views of one storage are one copy, and the storage is freed only when no view of it is
held. The list is the same for every microbatch of a shape.
"""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from attrs import evolve, frozen
from torch import Tensor, fx

from ...tensor_metadata import storage_of
from ..graph.sizes import Sizes
from ..graph.storages import storage_sizes
from ..regions.regions import runs_region
from .generated_code import Program, with_sizes
from .joint_graph import CAPTURED
from .shared_program import Shared
from .stage import Boundary, StageInputs


@frozen
class Backward:
    """A backward program.

    Args:
        run: takes the saved tensors that it reads, then the inputs of the stage that it reads, then gradients of
            outputs; gives gradients of parameters to its sink, and returns those of boundary inputs, then the tensors
            that it creates for W.
        saved: positions in F's saved tensors of those it reads.
        created: positions in I's created tensors of those it reads (W alone).
        inputs: positions of the stage inputs that it reads and that F does not save: parameters, buffers, batch, shared
            tensors.
        tangents: positions of the outputs whose gradient it reads.
        gradients: positions of the boundary inputs whose gradient it returns, in order.
        parameters: positions of the parameters whose gradient its sink gets, by number.
        computed: the same positions in the order in which it computes them, if no operators are fused.
        draws: ordinals of its random draws.
    """

    run: Program
    saved: tuple[int, ...]
    created: tuple[int, ...]
    inputs: tuple[int, ...]
    tangents: tuple[int, ...]
    gradients: tuple[int, ...]
    parameters: tuple[int, ...]
    computed: tuple[int, ...] = ()
    draws: tuple[int, ...] = ()


@frozen
class Recompute:
    """The part of F that computes its saved tensors, without what only other stages or the step's result need.

    Args:
        run: takes F's inputs, None for those that it does not read; returns F's saved tensors. It draws the same random
            numbers as F.
        inputs: positions of the inputs that must be kept for it: tensors of other stages, and buffers that F gives new
            values, because it reads the old ones.
    """

    run: Program
    inputs: tuple[int, ...]


@frozen
class StageMemory:
    """Bytes of one microbatch, over distinct storages, without parameters, buffers and shared tensors.

    Args:
        saved: that F saves for the backward.
        freed_by_input: of the saved tensors that only I reads.
        created_by_input: that I keeps for W.
        workspace: the largest that a program holds in addition to its inputs and the tensors that it keeps.
        inputs: that must be kept to recompute the saved tensors.
        shared: of the shared tensors, once for all microbatches.
    """

    saved: int
    freed_by_input: int
    created_by_input: int
    workspace: int
    inputs: int = 0
    shared: int = 0


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


@frozen
class StagePrograms:
    """All programs of one stage.

    Args:
        inputs: of F, in order; the shared tensors follow.
        outputs: tensors that later stages read, in the order in which F returns them; ``results`` follow.
        results: names of the parts of the step's result that F returns.
        forward: F: takes the inputs; returns outputs, results, new values of the buffers in ``mutated``, saved tensors.
        forward_alone: F without saved tensors, for a stage that recomputes them.
        recompute: computes the saved tensors again.
        mutated: positions among the inputs of the buffers that F gives new values for.
        backward: B, or None if the stage has no gradients.
        backward_input, backward_weight: I and W, or None if the backward cannot be split.
        memory: bytes that they hold.
        storages: of the saved tensors.
        shared: computes the shared tensors, once a step; None if there are none.
        draws: ordinals of the random draws of F, and of those that the recomputation repeats.
        host_read: an operator of F or the backward that reads values on the host, on a CUDA device; None without.
    """

    inputs: StageInputs
    outputs: tuple[Boundary, ...]
    results: tuple[str, ...]
    forward: Program
    forward_alone: Program
    recompute: Recompute
    mutated: tuple[int, ...]
    backward: Backward | None
    backward_input: Backward | None
    backward_weight: Backward | None
    memory: StageMemory
    storages: tuple[SavedStorage, ...] = ()
    shared: Shared | None = None
    draws: tuple[int, ...] = ()
    host_read: str | None = None

    def with_sizes(self, sizes: Sizes) -> "StagePrograms":
        """The programs with numbers in place of symbolic sizes; their memory remains that of the example."""

        def sized(part: Any) -> Any:
            return None if part is None else evolve(part, run=with_sizes(part.run, sizes))

        boundary, outputs = (
            tuple(b.with_sizes(sizes) for b in all_of) for all_of in (self.inputs.boundary, self.outputs)
        )
        shared = sized(self.shared)
        if self.shared is not None and shared.run is not self.shared.run:
            shared = evolve(shared, key=f"{shared.key}\n{sizes.symbols}")
        return evolve(
            self, inputs=evolve(self.inputs, boundary=boundary), outputs=outputs,
            forward=with_sizes(self.forward, sizes), forward_alone=with_sizes(self.forward_alone, sizes),
            recompute=sized(self.recompute), backward=sized(self.backward), shared=shared,
            backward_input=sized(self.backward_input), backward_weight=sized(self.backward_weight),
            storages=tuple(evolve(each, bytes=sizes.of(each.bytes)) for each in self.storages),
        )  # fmt: skip


def backward_inputs(
    program: Backward, saved: list[Any], created: list[Any], inputs: list[Any], tangents: dict[int, Any]
) -> list[Any]:
    """The inputs of a backward program, in its order.

    Args:
        program: the program.
        saved: F's saved tensors.
        created: the tensors that I created; empty for B and I.
        inputs: the stage's inputs; only parameters, buffers, constants and batch are read.
        tangents: position of an output → its gradient.
    """
    return [
        *(saved[i] for i in program.saved),
        *(created[i] for i in program.created),
        *(inputs[i] for i in program.inputs),
        *(tangents[i] for i in program.tangents),
    ]


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
