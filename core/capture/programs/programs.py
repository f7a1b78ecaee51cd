"""The programs of a stage: F, B, and, if the backward can be split, I and W, with explicit saved tensors.

The bytes that they hold are measured by running them over fake tensors. Operators that read values on the host are
found, because a CUDA graph cannot contain them.
"""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher

from ..graph.nodes import ancestors
from ..graph.randomness import ordinals_of
from ..graph.sizes import Sizes, hint
from ..graph.storages import StorageMeter, WatchEverything, storage_sizes
from .equal_layers import stage_joint
from .generated_code import Program, compile_program, no_sink, with_sizes
from .joint_graph import (
    JointGraph,
    closed_over,
    forward_nodes,
    ordered,
    selecting_nodes,
    split_masked,
)
from .recomputed import recompute
from .sections import Call, Fusion, Fusions
from .shared_program import shared_nodes, shared_program, shared_values
from .stage import StageGraph
from .stage_programs import (
    Backward,
    Recompute,
    StageMemory,
    StagePrograms,
    backward_inputs,
    python_reads,
    saved_storages,
)

aten = torch.ops.aten


def stage_programs(
    stage: StageGraph,
    fuse: Callable[[Fusion], Call] | None = None,
    now: Callable[[StagePrograms], Collection[Program]] | None = None,
) -> StagePrograms:
    """Derive a stage's programs from its graph.

    Args:
        stage: its graph.
        fuse: compiles a group of operators into one function; None if each operator runs by itself.
        now: those of the stage's programs whose groups are compiled before this returns, and not when they are first
            called; by default all.

    Raises:
        RequestError: an operator of the stage cannot be differentiated or made functional.
    """
    if all(node.op != "call_function" for node in stage.graph.nodes):
        return _empty_programs(stage)
    joint = stage_joint(stage)
    if not stage.gradients:
        joint.mutations.clear()
    boundaries = len(stage.inputs.boundary)
    returned = [*joint.outputs, *joint.mutations.values()]
    in_forward, gradients = forward_nodes(joint), joint.gradients
    once = shared_nodes(joint, stage.inputs, in_forward)
    shared = shared_values(once)
    done = in_forward.union(once)
    in_forward.difference_update(once)
    fixed = {node for i, node in joint.primals.items() if i >= boundaries and i not in joint.mutations}
    again = recompute(joint, in_forward, once, fixed)
    backward_nodes = ancestors(gradients.values()) - done
    reads = closed_over(ordered(joint.graph, backward_nodes), backward_nodes)
    reads += [node for node in gradients.values() if node not in backward_nodes and node not in reads]
    tangents = set(joint.tangents.values())
    persistent = {node: i for i, node in joint.primals.items() if i >= boundaries}
    persistent |= {node: len(stage.fakes) + i for i, node in enumerate(shared)}
    saved = [n for n in reads if n not in persistent and n not in tangents and n.op != "get_attr"]
    inputs = [*(joint.primals[i] for i in sorted(joint.primals)), *shared]
    fusions = None if fuse is None else Fusions()
    modules = {**stage.modules, **joint.constants}
    make = functools.partial(compile_program, modules=modules, fusions=fusions)
    forward = make(ordered(joint.graph, in_forward), inputs, [*returned, *saved])
    alone = make(ordered(joint.graph, in_forward), inputs, returned) if saved else forward
    builder = _BackwardBuilder(joint, make, saved, persistent, boundaries, done, again)
    backward = builder.program(backward_nodes, dict(gradients), ()) if gradients else None
    input_gradients = {i: node for i, node in gradients.items() if i < boundaries}
    backward_input = backward_weight = None
    if input_gradients and len(input_gradients) < len(gradients):
        backward_input, backward_weight = _halves(builder, input_gradients) or (None, None)
    programs = StagePrograms(
        stage.inputs, stage.outputs, stage.results, forward, alone, _recompute(builder, inputs, once),
        tuple(joint.mutations), backward, backward_input, backward_weight, StageMemory(0, 0, 0, 0),
        shared=shared_program(joint, stage.inputs, once), draws=ordinals_of(in_forward),
        host_read=host_read(joint.graph.nodes),
    )  # fmt: skip
    if stage.gradients:  # a forward alone saves nothing
        python = python_reads(ordered(joint.graph, in_forward))
        shown = make(ordered(joint.graph, in_forward), inputs, [*returned, *saved, *python]) if python else forward
        programs = measured(stage, joint, programs, saved, shown)
    if fusions is not None and fuse is not None:
        # Last, because a compiled function takes no fake tensors.
        fusions.bind(fuse, None if now is None else now(programs))
    return programs


def _empty_programs(stage: StageGraph) -> StagePrograms:
    """Programs of a stage without operators."""
    forward = compile_program([], [], [], {})
    again = Recompute(forward, ())
    return StagePrograms(stage.inputs, (), (), forward, forward, again, (), None, None, None, StageMemory(0, 0, 0, 0))


def _recompute(builder: "_BackwardBuilder", inputs: list[fx.Node], once: list[fx.Node]) -> Recompute:
    joint, saved = builder.joint, builder.saved
    nodes = ordered(joint.graph, ancestors(saved).difference(once))
    read = {*saved, *(source for node in nodes for source in node.all_input_nodes)}
    program = builder.make(nodes, inputs, saved)
    inputs_read = (i for i, node in sorted(joint.primals.items()) if node in read)
    return Recompute(program, tuple(i for i in inputs_read if i < builder.boundaries or i in joint.mutations))


@frozen
class _BackwardBuilder:
    """Builds the backward programs of one joint graph; see `stage_programs`.

    Args:
        joint: the joint graph.
        make: generates the program of some nodes, from their inputs and outputs.
        saved: nodes whose values F saves.
        persistent: inputs that F does not save, and shared tensors → the position among the inputs.
        boundaries: number of inputs from other stages, which are the first ones.
        done: nodes of F, and shared nodes.
        again: nodes of the backward that compute casts of F again.
    """

    joint: JointGraph
    make: Callable[..., Program]
    saved: list[fx.Node]
    persistent: dict[fx.Node, int]
    boundaries: int
    done: set[fx.Node]
    again: set[fx.Node]

    def program(
        self,
        nodes: set[fx.Node],
        gradients: dict[int, fx.Node],
        created: tuple[fx.Node, ...],
        extra: list[fx.Node] | None = None,
    ) -> Backward:
        """The backward program that returns ``gradients`` and then ``extra``, given what I ``created``."""
        run = ordered(self.joint.graph, nodes)
        reads = set(closed_over(run, nodes))
        reads |= {node for node in [*gradients.values(), *(extra or [])] if node not in nodes}
        saved = [i for i, node in enumerate(self.saved) if node in reads]
        made = [i for i, node in enumerate(created) if node in reads]
        inputs = [(node, i) for node, i in self.persistent.items() if node in reads]
        tangents = [(node, i) for i, node in self.joint.tangents.items() if node in reads and node not in created]
        order = [self.saved[i] for i in saved] + [created[i] for i in made]
        order += [node for node, _ in inputs] + [node for node, _ in tangents]
        boundary = {i: node for i, node in gradients.items() if i < self.boundaries}
        own = {i: node for i, node in gradients.items() if i >= self.boundaries}
        outputs = [*boundary.values(), *(extra or [])]
        function = self.make(run, order, outputs, for_sink=list(own.values()))
        place = {node: at for at, node in enumerate(run)}
        return Backward(
            function, tuple(saved), tuple(made), tuple(i for _, i in inputs), tuple(i for _, i in tangents),
            tuple(boundary), tuple(own), tuple(sorted(own, key=lambda i: place.get(own[i], -1))), ordinals_of(run),
        )  # fmt: skip


def _halves(builder: _BackwardBuilder, input_gradients: dict[int, fx.Node]) -> tuple[Backward, Backward] | None:
    """I and W, or None if nothing is left for W."""
    joint, done = builder.joint, builder.done
    split_masked(joint.graph, ancestors(input_gradients.values()))
    input_nodes = ancestors(input_gradients.values()) - done | builder.again
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
    # I returns its results that W reads, and the incoming gradients that W reads.
    of_first = input_nodes | set(joint.tangents.values())
    outside = closed_over(ordered(joint.graph, weight_nodes), weight_nodes)
    outside += [node for node in weight_gradients.values() if node not in weight_nodes]
    created = [node for node in dict.fromkeys(outside) if node in of_first and node.op != "get_attr"]
    first = builder.program(input_nodes, first_gradients, (), created)
    second = builder.program(weight_nodes, weight_gradients, tuple(created))
    return first, second


def measured(
    stage: StageGraph, joint: JointGraph, programs: StagePrograms, nodes: list[fx.Node], shown: Program
) -> StagePrograms:
    """Run the programs over fake tensors, and add the bytes that they hold and their saved storages.

    Programs with symbolic sizes run with those of the example, which takes a fraction of the time.

    Arguments as of `_measured`.
    """
    if not stage.symbols:
        return _measured(stage, joint, programs, nodes, shown)
    sizes = Sizes({size.node.expr: hint(size) for size in stage.symbols})
    with stage.fakes[0].fake_mode:  # type: ignore[attr-defined]
        fakes = tuple(map(sizes.fake, stage.fakes))
    own = programs.with_sizes(sizes)
    own_shown = own.forward if shown is programs.forward else with_sizes(shown, sizes)
    found = _measured(evolve(stage, fakes=fakes, symbols=()), joint, own, nodes, own_shown, sizes)
    storages = tuple(
        evolve(each, bytes=nodes[each.places[0]].meta["val"].untyped_storage().nbytes()) for each in found.storages
    )
    if [hint(each.bytes) for each in storages] != [each.bytes for each in found.storages]:
        return _measured(stage, joint, programs, nodes, shown)  # the trace's storages are not those of a run
    return evolve(programs, memory=found.memory, storages=storages)


def _measured(
    stage: StageGraph,
    joint: JointGraph,
    programs: StagePrograms,
    nodes: list[fx.Node],
    shown: Program,
    sizes: Sizes | None = None,
) -> StagePrograms:
    """The programs with the bytes that they hold and their saved storages, from a run over fake tensors.

    Args:
        stage: its graph.
        joint: its forward and backward.
        programs: derived from it.
        nodes: of the saved tensors.
        shown: F of these, followed by the tensors that regions read.
        sizes: that the programs and the stage's fake tensors have in place of the trace's symbolic ones.
    """
    fake_mode = stage.fakes[0].fake_mode  # type: ignore[attr-defined]
    boundaries = len(stage.inputs.boundary)
    returned = len(joint.outputs) + len(joint.mutations)
    first, second = programs.backward_input, programs.backward_weight
    dispatch = enable_python_dispatcher() if stage.symbols else contextlib.nullcontext()
    with fake_mode, torch.no_grad(), dispatch:
        inputs = [t.detach() for t in stage.fakes]
        own = storage_sizes(inputs[boundaries:])
        if programs.shared is not None:
            fixed = boundaries + len(stage.inputs.parameters) + len(stage.inputs.buffers) + len(stage.inputs.constants)
            inputs += programs.shared.run(inputs[boundaries:fixed], no_sink)
        persistent = storage_sizes(inputs[boundaries:])
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
        outputs = {i: joint.outputs[i].meta["val"] for i in joint.tangents}
        tangents = {i: torch.empty_like(sizes.fake(val) if sizes else val) for i, val in outputs.items()}
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


_CHECKED = {aten._linalg_check_errors.default, aten._ctc_loss.Tensor, aten._pack_padded_sequence.default}
"""Operators that read an error code or lengths."""
_INDEXED = {
    aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default,
    aten._unsafe_index.Tensor, aten._unsafe_index_put.default,
}  # fmt: skip
_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def host_read(nodes: Iterable[fx.Node]) -> str | None:
    """What the first of some nodes reads on the host, in words; None if none does.

    Args:
        nodes: of a functional graph, with their fake results in ``meta``.
    """
    for node in nodes:
        values = fx.map_arg((node.args, node.kwargs), lambda source: source.meta.get("val"))
        if reads_on_host(node.target, values[0], values[1]):
            masked = node.target in _INDEXED
            return f"{node.target}{' with a boolean mask' if masked else ''}"
    return None


def reads_on_host(target: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call of an operator reads a value on the host, on a CUDA device.

    Args:
        target: the operator.
        args, kwargs: its arguments.
    """
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target in _INDEXED:
        indices = args[1] if len(args) > 1 else kwargs.get("indices", ())
        return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)
    return target in _CHECKED or not _TAGS.isdisjoint(target.tags)
