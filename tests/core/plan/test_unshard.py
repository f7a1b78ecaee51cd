"""Runs of stages whose replicas share parameters: what is refused."""

from collections.abc import Sequence

import pytest
from panpipe.core.errors import RequestError
from panpipe.core.plan.memory_policy import StageUnshard
from panpipe.core.validation.validate import validate

from .test_unsharding import UNSHARD, runs, two_stages


@pytest.mark.parametrize(
    ("unshard", "reason"),
    [
        (UNSHARD[:1], "memory.unshard lacks stage 1, whose replicas share parameters: plan again, or give its runs"),
        (UNSHARD[::-1], r"memory.unshard names stages \[1, 0\]"),
        ((runs(0, (None, "0F0", "0F1")), UNSHARD[1]), "memory.unshard of stage 0 has 2 of its actions in runs"),
        ((runs(0, (None, "0F0", "0F1"), ("0F0", "0B0", "0B1")), UNSHARD[1]), "which is before the end of run 0, 0F1"),
        ((runs(0, ("0F0", "0F0", "0B1")), UNSHARD[1]), "after is 0F0, and 0F0 needs the parameters"),
        ((runs(0, (None, "0F0", "1F1")), UNSHARD[1]), "name the first and the last of some actions of stage 0"),
        ((runs(0, (None, "0B1", "0F0")), UNSHARD[1]), "goes from 0B1 to 0F0: name the first and the last"),
        ((runs(0, (None, "0F0", "0F7")), UNSHARD[1]), "last is 0F7, which is not in the order of device 0"),
        ((runs(0, ("0STEP", "0F0", "0F1")), UNSHARD[1]), "after is 0STEP, which is no compute"),
    ],
)
def test_wrong_runs_are_refused(unshard: Sequence[StageUnshard], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        validate(two_stages(unshard))
