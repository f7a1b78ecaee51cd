"""The parts of a step's result, and the devices that compute them."""

import pytest
from panpipe.runtimes.engine.result_parts import Computed, parts_of

from ...support.stages.two_stages import TwoStages


@pytest.mark.parametrize("place", [(0, 1), (1, 0)])
def test_parts_name_the_device_of_the_stage_that_computes_them(place):
    compiled = TwoStages().compiled
    name = compiled.operators.step.outputs.main_result
    assert parts_of(compiled, place) == [Computed(name, place[1]), None]
