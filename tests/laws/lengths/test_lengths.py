"""A step of any size equals a step captured for that size, to the last bit; all sizes take at most two captures."""

import copy

import panpipe
import pytest
import torch

from .models import CASES, Case

pytestmark = pytest.mark.filterwarnings("ignore:.*relates samples", "ignore:microbatches of a new shape")

MICROBATCHES = 2


@pytest.fixture
def captures(monkeypatch):
    """Counts captures: the calls of torch's export."""
    count, export = [0], torch.export.export

    def counted(*args, **kwargs):
        count[0] += 1
        return export(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", counted)
    return count


def built(case: Case, size: int, **options) -> panpipe.Pipeline:
    """A pipeline of two devices whose example has this size."""
    return panpipe.pipeline(
        case.model(), case.step, case.batch(size), optimizer=torch.optim.AdamW, microbatches=MICROBATCHES,
        plan_seconds=0.1, plan_cache=False, progress=False, **options,
    )  # fmt: skip


def check_equal_to_own_captures(case: Case, captures: list[int], **options) -> None:
    pipe = built(case, case.sizes[0], **options)
    pipe.step(case.batch(case.sizes[0]))
    counts = []
    for size in case.sizes[1:]:
        state, known = copy.deepcopy(pipe.state_dict()), captures[0]
        loss = pipe.step(case.batch(size))
        counts.append(captures[0] - known)
        fresh = built(case, size, **options)
        fresh.load_state_dict(state)
        assert torch.equal(fresh.step(case.batch(size)), loss), size
        others = dict(fresh.model.named_parameters())
        for name, parameter in pipe.model.named_parameters():
            assert torch.equal(parameter, others[name]), (size, name)
    assert counts == [1, *(0 for _ in case.sizes[2:])]


QUICK = ("llama", "unet")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]
)
def test_sizes_equal_their_own_captures(name, captures):
    check_equal_to_own_captures(CASES[name], captures)
