"""Counts and sizes in words."""

import pytest
from attrs import evolve
from panpipe.core.cluster.mesh import Mesh
from panpipe.core.plan.wording import counted, first_of, module_text, plan_size

from ...support.plans import scheduled


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


def test_the_first_of_names():
    assert first_of(["a"]) == "a"
    assert first_of(["a", "b", "c"]) == "a and 2 more"
    assert first_of(["a", "b", "c", "d"], 3) == "a, b, c and 1 more"
    assert first_of(["a", "b", "c"], 3) == "a, b, c"


def test_a_module():
    assert module_text("blocks.0") == "module 'blocks.0'"
    assert module_text("") == "the model"


def test_a_plan_with_and_without_replicas():
    plan = scheduled("1f1b", 2, 4)
    assert plan_size(plan) == "2 stages on 2 devices, 4 microbatches"
    assert plan_size(evolve(plan, mesh=Mesh(2, 3))) == "2 stages on 3 × 2 devices, 4 microbatches"
    assert plan_size(scheduled("1f1b", 1, 1)) == "1 stage on 1 device, 1 microbatch"
