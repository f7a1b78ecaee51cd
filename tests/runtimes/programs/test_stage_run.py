"""A stage's programs bound to tensors: what each returns, adds to gradients, and holds between them."""

import gc
import weakref

import pytest
import torch
from attrs import evolve
from panpipe.backends.contract import Backend
from panpipe.backends.memcpy import connect
from panpipe.runtimes.optimizer.sharing.sharded_buckets import Sharing
from panpipe.runtimes.optimizer.stage_state import StageState
from panpipe.runtimes.programs.stage_run import StageRun

from ...support.stages.two_stages import KEY, WIDTH, TwoStages, assert_same_gradients

SEED = torch.tensor(0.5)


def forward(stages: TwoStages, microbatch: int) -> torch.Tensor:
    """F of both stages; the loss."""
    leaves = stages.pieces[microbatch].leaves
    outputs, results = stages.runs[0].forward(microbatch, [], leaves, KEY)
    assert results == []
    assert [tuple(each.shape) for each in outputs] == [(2, WIDTH)]
    outputs, results = stages.runs[1].forward(microbatch, list(outputs), leaves, KEY)
    assert outputs == []
    return results[0]


def backward(stages: TwoStages, microbatch: int, split: bool) -> None:
    """The backwards of both stages."""
    leaves = stages.pieces[microbatch].leaves
    tangents: dict[int, torch.Tensor] = {}
    for run in (stages.runs[1], stages.runs[0]):
        program = run.backward_input if split else run.backward
        messages = program(microbatch, tangents, SEED, leaves, KEY)
        tangents = dict(enumerate(messages[0])) if messages else {}
    if split:
        for run in stages.runs.values():
            run.backward_weight(microbatch, SEED, leaves, KEY)


@pytest.mark.parametrize("split", [False, True], ids=["B", "I and W"])
@torch.no_grad()
def test_stage_run_computes_the_loss_and_gradients_of_autograd(split):
    stages = TwoStages()
    expected = stages.alone()
    losses = []
    for m in range(2):
        losses.append(forward(stages, m))
        backward(stages, m, split)
    whole = expected(torch.cat([piece.batch for piece in stages.pieces])).pow(2).mean()
    torch.testing.assert_close(torch.stack(losses).mean(), whole)
    assert_same_gradients(stages.model, expected)


@torch.no_grad()
def test_stage_run_holds_saved_tensors_of_each_microbatch_until_its_backward():
    stages = TwoStages()
    for m in range(2):
        forward(stages, m)
    assert all(run.held(m) for run in stages.runs.values() for m in range(2))
    backward(stages, 0, False)
    assert [bool(run.held(m)) for run in stages.runs.values() for m in range(2)] == [False, True, False, True]


@torch.no_grad()
def test_stage_run_keeps_for_w_what_w_reads_and_no_more():
    stages = TwoStages()
    forward(stages, 0)
    run = stages.runs[1]
    leaves = stages.pieces[0].leaves
    assert stages.model[2].weight.grad is None
    messages = run.backward_input(0, {}, SEED, leaves, KEY)
    assert [tuple(each.shape) for each in messages[0]] == [(2, WIDTH)]
    assert stages.model[2].weight.grad is None
    kept = [each for each in run.held(0) if each is not None]
    assert kept
    run.backward_weight(0, SEED, leaves, KEY)
    assert not run.held(0)
    assert stages.model[2].weight.grad is not None


@torch.no_grad()
def test_stage_run_that_recomputes_holds_its_inputs_until_recompute():
    stages = TwoStages(recompute=(1,))
    expected = stages.alone()
    for m in range(2):
        forward(stages, m)
        run = stages.runs[1]
        assert [tuple(each.shape) for each in run.held(m)] == [(2, WIDTH)]
        run.recompute(m, stages.pieces[m].leaves, KEY)
        assert len(run.held(m)) > 1
        backward(stages, m, False)
        assert not run.held(m)
    assert_same_gradients(stages.model, expected)


@torch.no_grad()
def test_stage_run_without_gradients_holds_nothing():
    stages = TwoStages(gradients=False)
    forward(stages, 0)
    assert not any(run.held(0) for run in stages.runs.values())


def test_stage_run_knows_the_shapes_of_the_messages_it_gets():
    stages = TwoStages()
    message = [((2, WIDTH), torch.float32)]
    assert stages.runs[1].message(True, 0) == message
    assert stages.runs[0].message(False, 1) == message
    assert (stages.runs[0].senders, stages.runs[0].receivers) == ((), (1,))
    assert (stages.runs[1].senders, stages.runs[1].receivers) == ((0,), ())


@torch.no_grad()
def test_a_dropped_stage_is_freed_at_once_and_not_by_the_garbage_collector():
    """While plans are measured, the tensors of two stages would otherwise be in memory together."""
    stages = TwoStages()
    forward(stages, 0)
    dropped = [weakref.ref(run) for run in stages.runs.values()]
    gc.collect()
    gc.disable()
    try:
        stages.runs.clear()
        assert [ref() for ref in dropped] == [None, None]
    finally:
        gc.enable()


def sharing_runs(stages: TwoStages, end: Backend, halves: bool) -> dict[int, StageRun]:
    """Runs of the same stages whose replicas share gradients; without halves, I or W runs the whole backward."""
    runs, step = {}, stages.compiled.operators.step
    for i, programs in stages.compiled.programs.items():
        own = programs if halves else evolve(programs, backward_input=None, backward_weight=None)
        sharing = Sharing(lambda: end, 0, 1, gradients=True)
        parameters = stages.states[i].parameters
        state = StageState(parameters, {}, lambda groups: torch.optim.SGD(groups, lr=0.1), True, sharing=sharing)
        runs[i] = StageRun(i, own, stages.compiled.layout, state, step.constants, step.outputs.main_result)
    return runs


@pytest.mark.parametrize("kind", ["B", "I and W", "whole backward in I or W"])
@torch.no_grad()
def test_gradients_that_replicas_share_are_summed_apart_from_parameters(kind):
    stages, (end,) = TwoStages(), connect(1)
    expected = dict(stages.alone().named_parameters())
    stages.runs = sharing_runs(stages, end, kind == "I and W")
    for m in range(2):
        forward(stages, m)
    for m in range(2):
        leaves, tangents = stages.pieces[m].leaves, dict[int, torch.Tensor]()
        for run in (stages.runs[1], stages.runs[0]):
            program = run.backward if kind == "B" else run.backward_input
            messages = program(m, tangents, SEED, leaves, KEY)
            tangents = dict(enumerate(messages[0])) if messages else {}
            if kind == "B":
                run.state.scatter.scatter().wait()
    if kind != "B":
        assert stages.runs[1].state.shards.slots.all == []  # what I computes waits outside of the slots
    for m in range(2 if kind != "B" else 0):
        for run in stages.runs.values():
            run.backward_weight(m, SEED, stages.pieces[m].leaves, KEY)
            run.state.scatter.scatter().wait()
    for run in stages.runs.values():
        run.state.reduce_gradients(end).wait()
        assert len(run.state.shards.slots.all) == 2
        for name, part in run.state.shards.parts.items():
            assert run.state.parameters[name].grad is None
            torch.testing.assert_close(part.value.grad, expected[name].grad.flatten())
