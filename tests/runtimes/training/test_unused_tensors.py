"""Parts of a model that the example's step does not use have a stage; later steps train them as eager PyTorch does."""

import pytest
from panpipe.core.errors import RequestError
from panpipe.runtimes.launch.team import ThreadTeam

from ...support.launch import results
from ...support.programs.unused_parts import ADAM, SGD, Early, distance_over_tasks, part_programs, seeded


@pytest.mark.filterwarnings("ignore:.*the loss does not depend on it")
@pytest.mark.parametrize("optimizer", [ADAM, SGD], ids=["AdamW", "SGD"])
@pytest.mark.parametrize("make", part_programs.values(), ids=list(part_programs))
def test_parts_that_the_example_does_not_use_train_later(make, optimizer):
    assert distance_over_tasks(ThreadTeam(2), make, optimizer) < 1e-12


@pytest.mark.filterwarnings("ignore:.*the loss does not depend on it")
def test_a_part_in_a_stage_that_is_too_early_is_refused_with_its_line_and_a_fix():
    said = (
        r"unused_parts\.py:\d+: .* '/mul', which depends on it, in stage 0 .* register a parameter that it did not use"
    )
    with pytest.raises(RequestError, match=said):
        distance_over_tasks(ThreadTeam(2), seeded(Early), SGD)


@pytest.mark.parametrize(("ranks", "mesh"), [
    (2, "pp=2"),
    pytest.param(4, "pp=2,dp=2", marks=pytest.mark.slow),
])  # fmt: skip
def test_parts_train_later_over_ranks(ranks, mesh, tmp_path):
    for found in results("unused_parts", tmp_path, ranks, MESH=mesh):
        for name, distance in found.items():
            assert distance < 1e-12, name
