"""The parts of a trainer for one plan, and that they belong together."""

import pytest
import torch

from ...support.stages.arranged import Arranged


@pytest.mark.parametrize("devices", [1, 2])
def test_parts_are_those_of_the_devices_of_this_process(devices):
    made = Arranged(devices=devices)
    parts = made.parts
    assert parts.plan is made.plan
    assert set(parts.queues) == set(made.team.local) == set(range(devices))
    assert set(parts.stages.states) == {stage.index for stage in made.plan.stages}
    assert parts.stages.where == {stage.index: torch.device("cpu") for stage in made.plan.stages}
    assert parts.offloads == {}
    assert made.team.where == dict.fromkeys(range(devices), torch.device("cpu"))
    made.team.close()


def test_programs_of_the_example_are_kept_for_its_shape():
    made = Arranged()
    assert made.parts.variants.shapes.programs_for(made.pieces())[1] is None  # nothing is captured again
    made.team.close()
