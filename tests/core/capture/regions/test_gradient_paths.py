"""The paths of gradients through regions."""

import torch
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step

from ....support.programs.unused_branches import WIDTH, named_programs

BATCH = {key: torch.ones(4, WIDTH, dtype=torch.float64) for key in "xy"}


def paths_of(name):
    model, step = named_programs[name]()
    return operators_of(capture_step(model, step, BATCH)).paths


def test_a_parameter_gets_a_gradient_if_all_regions_on_a_path_are_crossed():
    paths = paths_of("module_with_a_branch_after_another_one")
    between = {name for name in paths.parameters if name.startswith("between")}
    assert between
    assert between <= paths.reached(paths.crossings)
    assert not paths.reached(()) & set(paths.parameters)
    last = max(k for k, _, _ in paths.crossings)
    behind_the_last = paths.reached([each for each in paths.crossings if each[0] == last])
    assert between <= behind_the_last
    assert not any(name.startswith("chain.a") for name in behind_the_last)


def test_parameters_that_the_loss_reaches_directly_always_get_one():
    paths = paths_of("module_with_a_branch_after_another_one")
    assert {"end.0.0.weight", "end.0.0.bias"} <= paths.reached(())
    assert not any(parameter.startswith("end") for parameter in paths.parameters)
