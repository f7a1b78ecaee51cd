"""The programs of a stage: F, B, and, if the backward can be split, I and W, with explicit saved tensors."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from attrs import evolve, frozen
from torch import fx

from ..graph.storages import StorageMeter, WatchEverything, storage_sizes
from .code import Program, compile_program, no_sink
from .fusing import Call, Fusion, Fusions
from .joint import (
    JointGraph,
    ancestors,
    closed_over,
    forward_nodes,
    ordered,
    selecting_nodes,
    split_masked,
    trace_joint,
)
from .saved_storages import SavedStorage, python_reads, saved_storages
from .shared import Shared, shared_nodes, shared_program, shared_values
from .stage import Boundary, StageGraph, StageInputs


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
    """

    run: Program
    saved: tuple[int, ...]
    created: tuple[int, ...]
    inputs: tuple[int, ...]
    tangents: tuple[int, ...]
    gradients: tuple[int, ...]
    parameters: tuple[int, ...]


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


def stage_programs(stage: StageGraph, fuse: Callable[[Fusion], Call] | None = None) -> StagePrograms:
    """Derive a stage's programs from its graph.

    Args:
        stage: its graph.
        fuse: compiles a group of operators into one function; None if each operator runs by itself.

    Raises:
        RequestError: an operator of the stage cannot be differentiated or made functional.
    """
    if all(node.op != "call_function" for node in stage.graph.nodes):
        return _empty_programs(stage)
    joint = trace_joint(stage)
    if not stage.gradients:
        joint.mutations.clear()
    kept = len(stage.inputs.boundary)
    returned = [*joint.outputs, *joint.mutations.values()]
    in_forward, gradients = forward_nodes(joint), joint.gradients
    once = shared_nodes(joint, stage.inputs, in_forward)
    shared = shared_values(once)
    done = in_forward.union(once)
    in_forward.difference_update(once)
    backward_nodes = ancestors(gradients.values()) - done
    reads = closed_over(ordered(joint.graph, backward_nodes), backward_nodes)
    reads += [node for node in gradients.values() if node not in backward_nodes and node not in reads]
    tangents = set(joint.tangents.values())
    persistent = {node: i for i, node in joint.primals.items() if i >= kept}
    persistent |= {node: len(stage.fakes) + i for i, node in enumerate(shared)}
    saved = [n for n in reads if n not in persistent and n not in tangents and n.op != "get_attr"]
    inputs = [*(joint.primals[i] for i in sorted(joint.primals)), *shared]
    fusions = None if fuse is None else Fusions()
    make = functools.partial(compile_program, modules=stage.modules, fusions=fusions)
    forward = make(ordered(joint.graph, in_forward), inputs, [*returned, *saved])
    alone = make(ordered(joint.graph, in_forward), inputs, returned)
    cut = _Cut(joint, make, saved, persistent, kept, done)
    backward = cut.program(backward_nodes, dict(gradients), ()) if gradients else None
    input_gradients = {i: node for i, node in gradients.items() if i < kept}
    backward_input = backward_weight = None
    if input_gradients and len(input_gradients) < len(gradients):
        backward_input, backward_weight = _halves(cut, input_gradients) or (None, None)
    programs = StagePrograms(
        stage.inputs, stage.outputs, stage.results, forward, alone, _recompute(cut, inputs, once),
        tuple(joint.mutations), backward, backward_input, backward_weight, StageMemory(0, 0, 0, 0),
        shared=shared_program(joint, stage.inputs, once),
    )  # fmt: skip
    python = python_reads(ordered(joint.graph, in_forward))
    shown = make(ordered(joint.graph, in_forward), inputs, [*returned, *saved, *python]) if python else forward
    programs = _measured(stage, joint, programs, saved, shown)
    if fusions is not None and fuse is not None:
        fusions.bind(fuse)  # last, because a compiled function takes no fake tensors
    return programs


def _empty_programs(stage: StageGraph) -> StagePrograms:
    """Programs of a stage without operators."""
    forward = compile_program([], [], [], {})
    again = Recompute(forward, ())
    return StagePrograms(stage.inputs, (), (), forward, forward, again, (), None, None, None, StageMemory(0, 0, 0, 0))


def _recompute(cut: "_Cut", inputs: list[fx.Node], once: list[fx.Node]) -> Recompute:
    joint, saved = cut.joint, cut.saved
    nodes = ordered(joint.graph, ancestors(saved).difference(once))
    read = {*saved, *(source for node in nodes for source in node.all_input_nodes)}
    program = cut.make(nodes, inputs, saved)
    keeps = (i for i, node in sorted(joint.primals.items()) if node in read and (i < cut.kept or i in joint.mutations))
    return Recompute(program, tuple(keeps))


@frozen
class _Cut:
    """The common inputs of the backward programs of one joint graph; see `stage_programs`.

    ``done`` are the nodes of F and the shared nodes.
    """

    joint: JointGraph
    make: Callable[..., Program]
    saved: list[fx.Node]
    persistent: dict[fx.Node, int]
    kept: int
    done: set[fx.Node]

    def program(
        self,
        nodes: set[fx.Node],
        gradients: dict[int, fx.Node],
        created: tuple[fx.Node, ...],
        extra: list[fx.Node] | None = None,
    ) -> Backward:
        """Make a backward program that returns ``gradients`` and then ``extra``, given what I ``created``."""
        run = ordered(self.joint.graph, nodes)
        reads = set(closed_over(run, nodes))
        reads |= {node for node in [*gradients.values(), *(extra or [])] if node not in nodes}
        saved = [i for i, node in enumerate(self.saved) if node in reads]
        made = [i for i, node in enumerate(created) if node in reads]
        inputs = [(node, i) for node, i in self.persistent.items() if node in reads]
        tangents = [(node, i) for i, node in self.joint.tangents.items() if node in reads and node not in created]
        order = [self.saved[i] for i in saved] + [created[i] for i in made]
        order += [node for node, _ in inputs] + [node for node, _ in tangents]
        boundary = {i: node for i, node in gradients.items() if i < self.kept}
        own = {i: node for i, node in gradients.items() if i >= self.kept}
        outputs = [*boundary.values(), *(extra or [])]
        function = self.make(run, order, outputs, handed_over=list(own.values()))
        return Backward(
            function, tuple(saved), tuple(made), tuple(i for _, i in inputs), tuple(i for _, i in tangents),
            tuple(boundary), tuple(own),
        )  # fmt: skip


def _halves(cut: _Cut, input_gradients: dict[int, fx.Node]) -> tuple[Backward, Backward] | None:
    """I and W, or None if nothing is left for W."""
    joint, done = cut.joint, cut.done
    split_masked(joint.graph, ancestors(input_gradients.values()))
    input_nodes = ancestors(input_gradients.values()) - done
    first_gradients, weight_gradients = dict(input_gradients), dict[int, fx.Node]()
    for i, node in joint.gradients.items():
        if i in input_gradients:
            continue
        picked = selecting_nodes(node, done | input_nodes)
        if picked is None or node in done:
            weight_gradients[i] = node
        else:
            first_gradients[i] = node
            input_nodes |= picked
    if not weight_gradients:
        return None
    weight_nodes = ancestors(weight_gradients.values()) - done - input_nodes
    # I hands over its results that W reads, and the incoming gradients that W reads.
    handed_over = input_nodes | set(joint.tangents.values())
    outside = closed_over(ordered(joint.graph, weight_nodes), weight_nodes)
    outside += [node for node in weight_gradients.values() if node not in weight_nodes]
    created = [node for node in dict.fromkeys(outside) if node in handed_over and node.op != "get_attr"]
    first = cut.program(input_nodes, first_gradients, (), created)
    second = cut.program(weight_nodes, weight_gradients, tuple(created))
    return first, second


def _measured(
    stage: StageGraph, joint: JointGraph, programs: StagePrograms, nodes: list[fx.Node], shown: Program
) -> StagePrograms:
    """Run the programs over fake tensors: what they hold. ``shown`` is F of these saved ``nodes``, followed by what
    regions read."""
    fake_mode = stage.fakes[0].fake_mode  # type: ignore[attr-defined]
    kept = len(stage.inputs.boundary)
    returned = len(joint.outputs) + len(joint.mutations)
    first, second = programs.backward_input, programs.backward_weight
    with fake_mode, torch.no_grad():
        inputs = [t.detach() for t in stage.fakes]
        own = storage_sizes(inputs[kept:])
        if programs.shared is not None:
            fixed = kept + len(stage.inputs.parameters) + len(stage.inputs.buffers) + len(stage.inputs.constants)
            inputs += programs.shared.run(inputs[kept:fixed], no_sink)
        persistent = storage_sizes(inputs[kept:])
        shared = sum(size for key, size in persistent.items() if key not in own)
        again = sum(storage_sizes(inputs[i] for i in programs.recompute.inputs).values())
        results, workspace = _run(programs.forward, list(inputs), persistent, returned)
        saved = results[returned:]
        every = results if shown is programs.forward else shown(list(inputs), no_sink)
        end = returned + len(nodes)
        storages = saved_storages(
            nodes, every[returned:end], stage.inputs, inputs, every[: len(joint.outputs)], every[end:]
        )
        programs = evolve(programs, storages=storages)
        held = {key: size for key, size in storage_sizes(saved).items() if key not in persistent}
        tangents = {i: torch.empty_like(joint.outputs[i].meta["val"]) for i in joint.tangents}
        backward = programs.backward
        if backward is not None:
            given = backward_inputs(backward, saved, [], inputs, tangents)
            workspace = max(workspace, _run(backward.run, list(given), persistent, 0)[1])
        if first is None or second is None:
            return evolve(programs, memory=StageMemory(sum(held.values()), 0, 0, workspace, again, shared))
        made = first.run(backward_inputs(first, saved, [], inputs, tangents), no_sink)[len(first.gradients) :]
        still = storage_sizes([saved[i] for i in second.saved] + made)
        freed = sum(size for key, size in held.items() if key not in still)
        created = sum(size for key, size in still.items() if key not in held and key not in persistent)
    return evolve(programs, memory=StageMemory(sum(held.values()), freed, created, workspace, again, shared))


def _run(program: Program, given: list[Any], ignored: dict[int, int], returned: int) -> tuple[list[Any], int]:
    """Run a program; return its results, and the most bytes that it held in addition to its inputs and the tensors that
    it keeps (its results after the first ``returned``)."""
    ignored = ignored | storage_sizes(given)
    meter = StorageMeter()
    with WatchEverything(meter, ignored):
        results = program(given, no_sink)
    kept = sum(size for key, size in storage_sizes(results[returned:]).items() if key not in ignored)
    return results, max(meter.peak - kept, 0)


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
