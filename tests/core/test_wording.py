"""Counts and sizes in words."""

import pytest
from attrs import evolve
from panpipe.core.mesh import Mesh
from panpipe.core.wording import counted, plan_size

from ..support.plans import scheduled


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (1, "device", "1 device"),
        (2, "device", "2 devices"),
        (0, "stage", "0 stages"),
        (3, "microbatch", "3 microbatches"),
    ],
)
def test_counted(count, noun, text):
    assert counted(count, noun) == text


def test_a_plan_with_and_without_replicas():
    plan = scheduled("1f1b", 2, 4)
    assert plan_size(plan) == "2 stages on 2 devices, 4 microbatches"
    assert plan_size(evolve(plan, mesh=Mesh(2, 3))) == "2 stages on 3 × 2 devices, 4 microbatches"
    assert plan_size(scheduled("1f1b", 1, 1)) == "1 stage on 1 device, 1 microbatch"
