"""The bytes that a stage's programs hold, measured by running them over fake tensors."""

from typing import Any

import torch
from attrs import evolve
from torch import fx

from ..graph.storages import StorageMeter, WatchEverything, storage_sizes
from .generated_code import Program, no_sink
from .joint_graph import JointGraph
from .saved_storages import saved_storages
from .stage import StageGraph
from .stage_programs import StageMemory, StagePrograms, backward_inputs


def measured(
    stage: StageGraph, joint: JointGraph, programs: StagePrograms, nodes: list[fx.Node], shown: Program
) -> StagePrograms:
    """Run the programs over fake tensors, and add the bytes that they hold and their saved storages.

    Args:
        stage: its graph.
        joint: its forward and backward.
        programs: derived from it.
        nodes: of the saved tensors.
        shown: F of these, followed by the tensors that regions read.
    """
    fake_mode = stage.fakes[0].fake_mode  # type: ignore[attr-defined]
    boundaries = len(stage.inputs.boundary)
    returned = len(joint.outputs) + len(joint.mutations)
    first, second = programs.backward_input, programs.backward_weight
    with fake_mode, torch.no_grad():
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
