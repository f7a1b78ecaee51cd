"""A stage without graphs runs its programs, and nothing while the others are captured."""

import torch
from panpipe.runtimes.programs.graphs.ungraphed_stage import UngraphedStage

from ....support.stages.two_stages import KEY, WIDTH, TwoStages

SEED = torch.tensor(0.5)


@torch.no_grad()
def test_it_runs_nothing_during_a_capture_and_keeps_its_inputs():
    stages = TwoStages()
    first, second = (UngraphedStage(run) for run in stages.runs.values())
    first.kept, second.kept = [], []
    leaves = stages.pieces[0].leaves
    outputs, results = first.forward(0, [], leaves, KEY)
    assert ([each.shape for each in outputs], results) == ([(2, WIDTH)], [])
    _, results = second.forward(0, outputs, leaves, KEY)
    assert [each.shape for each in results] == [()]
    assert second.kept == outputs
    for backward in (second.backward, second.backward_input):
        ((message,),) = backward(0, {}, SEED, leaves, KEY)
        assert message.shape == (2, WIDTH)
    second.backward_weight(0, SEED, leaves, KEY)
    second.recompute(0, leaves, KEY)
    assert first.backward(0, {0: message}, SEED, leaves, KEY) == []
    assert first.kept == [message]
    assert not any(stage.held(0) for stage in (first, second))
    assert all(parameter.grad is None for parameter in stages.model.parameters())


@torch.no_grad()
def test_it_runs_its_programs_in_a_step():
    stages, other = TwoStages(), TwoStages()
    first, second = (UngraphedStage(run) for run in stages.runs.values())
    leaves = stages.pieces[0].leaves
    for one, two in ((first, second), tuple(other.runs.values())):
        outputs, _ = one.forward(0, [], leaves, KEY)
        two.forward(0, list(outputs), leaves, KEY)
        ((message,),) = two.backward_input(0, {}, SEED, leaves, KEY)
        two.backward_weight(0, SEED, leaves, KEY)
        one.backward(0, {0: message}, SEED, leaves, KEY)
    for parameter, wanted in zip(stages.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(parameter.grad, wanted.grad)
    assert first.persistent == stages.runs[0].persistent
    assert first.shared_bytes == 0
