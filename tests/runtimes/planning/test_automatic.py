"""Automatic planning: how many stages are tried, which plans are kept, and what is refused before measuring."""

import panpipe
import pytest
import torch
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.search.suggestions.preference import family_of
from torch import nn

from ...laws.grouped import grouped

BATCH = torch.randn(8, 4)


def square(model, batch):
    return model(batch).square().mean()


def pipeline(layers, said, step=square, **options):
    """An automatic plan of equal layers; lines of progress are appended to ``said``."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    options = {"cluster": "cpu:2", "cache": False, **options}
    return panpipe.pipeline(
        model, step, BATCH, optimizer=torch.optim.SGD, microbatches=4,
        **grouped(progress=lambda phase, done, total: said.append(phase), **options),
    )  # fmt: skip


def test_more_stages_are_tried_up_to_max_chunks_and_the_number_of_operators():
    for layers, most in ((8, 8), (3, 4)):  # two more operators compute the loss
        said = []
        pipeline(layers, said, schedule="interleaved-1f1b", max_chunks=4).close()
        assert [line for line in said if "cutting" in line] == [
            f"cutting into {n} stages" for n in range(2, most + 1, 2)
        ]


def test_schedules_that_are_predicted_alike_are_compared():
    """Of schedules with as many stages and near predictions, two at most are candidates, and 1F1B always."""
    with pipeline(8, [], max_chunks=2, contest=4) as pipe:
        found = [(len(each.plan.stages), family_of(each.plan)) for each in pipe.contest.candidates]
    families = {family for stages, family in found if stages == 4}
    assert "1f1b" in {family for _, family in found}
    assert len(families) <= 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"recompute": [7]}, r"recompute names stage 7, and the plan has stages 0 to 3"),
        ({"offload": {9: 0.5}}, "9"),
        ({"cluster": fully_connected(1, 1, 1.0, 0.0), "mesh": 2}, "the cluster has 1"),
    ],
)
def test_request_is_refused_before_anything_is_measured(options, said):
    lines = []
    with pytest.raises(panpipe.RequestError, match=said):
        pipeline(8, lines, max_chunks=2, **options)
    assert not any("measuring" in line for line in lines)


def test_devices_measure_a_loss_that_stays_python_at_the_same_time():
    """Each copies the model for it, with many parameters."""

    def step(model, batch):
        out = model(batch)
        return out.square().mean() if out.sum() > -1e9 else out.mean()

    with pipeline(100, [], step, cluster=None) as pipe:
        assert pipe.step(BATCH).isfinite()
