"""A stage that replays graphs: it returns what its programs return, from memory at fixed addresses."""

import pytest
import torch
from panpipe.core.actions import Kind
from panpipe.runtimes.programs.graphs.graphed_stage import Capture, GraphedStage

from ....support.backends.fake_graphs import FakeGraphPool
from ....support.stages.two_stages import KEY, WIDTH, TwoStages

SEED = torch.tensor(0.5)


def captured(stages):
    """Both stages with the actions of one microbatch captured, and what they captured."""
    capture = Capture(FakeGraphPool(torch.device("cpu")))
    graphed = [GraphedStage(run) for run in stages.runs.values()]
    for stage in graphed:
        stage.capture = capture
    step(graphed, stages.pieces[0].leaves)
    for stage in graphed:
        stage.capture, stage.calls = None, capture.calls
    for parameter in stages.model.parameters():
        parameter.grad = None
    return graphed, capture


def step(stages, leaves):
    """F and B of both stages; the loss."""
    first, second = stages
    outputs, _ = first.forward(0, [], leaves, KEY)
    _, results = second.forward(0, list(outputs), leaves, KEY)
    messages = second.backward(0, {}, SEED, leaves, KEY)
    first.backward(0, {0: messages[0][0]}, SEED, leaves, KEY)
    return results[0]


@torch.no_grad()
def test_replay_computes_what_the_programs_compute():
    stages, other = TwoStages(), TwoStages()
    graphed, capture = captured(stages)
    assert [kind for _, kind, _ in capture.calls] == [Kind.F, Kind.F, Kind.B, Kind.B]
    assert all(parameter.grad is None for parameter in stages.model.parameters())
    for piece in other.pieces:
        for parameter in (*stages.model.parameters(), *other.model.parameters()):
            parameter.grad = None
        assert torch.equal(step(graphed, piece.leaves), step(list(other.runs.values()), piece.leaves))
        for one, wanted in zip(stages.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(one.grad, wanted.grad)


@torch.no_grad()
def test_capture_executes_nothing():
    stages = TwoStages()
    before = [parameter.clone() for parameter in stages.model.parameters()]
    owned = [(state, parameter) for state in stages.states.values() for parameter in state.parameters.values()]
    buffers = [state.gradient_buffer(parameter).fill_(7) for state, parameter in owned]
    graphed, capture = captured(stages)
    assert all(torch.equal(one, other) for one, other in zip(stages.model.parameters(), before, strict=True))
    assert all((buffer == 7).all() for buffer in buffers)
    outputs = capture.calls[0, Kind.F, 0].outputs[0]
    assert outputs[0].isnan().all()
    assert not any(stage.run.held(0) for stage in graphed)


@torch.no_grad()
def test_input_at_its_address_is_not_copied():
    stages = TwoStages()
    graphed, capture = captured(stages)
    first, second = (capture.calls[i, Kind.F, 0] for i in (0, 1))
    assert second.inputs[0].data_ptr() == first.outputs[0][0].data_ptr()
    step(graphed, stages.pieces[0].leaves)
    other = torch.randn(2, WIDTH)
    second.replay([other], KEY)
    assert torch.equal(first.outputs[0][0], other)  # elsewhere: it is copied to the address


@torch.no_grad()
def test_stand_ins_live_as_long_as_saved_tensors():
    stages, other = TwoStages(), TwoStages()
    graphed, _ = captured(stages)
    leaves = stages.pieces[0].leaves
    graphed[0].forward(0, [], leaves, KEY)
    other.runs[0].forward(0, [], leaves, KEY)
    kept = {t.untyped_storage()._cdata for t in leaves} | other.runs[0].persistent
    saved = [t.nbytes for t in other.runs[0].held(0) if t.untyped_storage()._cdata not in kept]
    assert [t.nbytes for t in graphed[0].held(0)] == saved
    assert saved
    graphed[0].backward(0, {0: torch.zeros(2, WIDTH)}, SEED, leaves, KEY)
    assert graphed[0].held(0) == []


@torch.no_grad()
def test_value_that_is_read_on_the_host_stops_the_capture():
    stages = TwoStages()
    run = stages.runs[0]
    forward = run.forward

    def reading(microbatch, boundary, leaves, key):
        outputs, results = forward(microbatch, boundary, leaves, key)
        outputs[0].sum().item()
        return outputs, results

    run.forward = reading
    with pytest.raises(RuntimeError, match=r"not permitted when stream is capturing: aten._local_scalar_dense"):
        captured(stages)
