"""The schedule of a name for uniform stages: its parameters, chunks and memory limit."""

import re

import pytest
from panpipe.answers.schedule import build_schedule
from panpipe.answers.uniform import UniformStages
from panpipe.core.costs.costs import StageCosts
from panpipe.core.errors import InfeasibleError, RequestError

TIMES = StageCosts(1.0, 1.0, 1.0, saved_bytes=1)


def stages(scales=None):
    return UniformStages(2, 4, TIMES, scales, 0.0)


def test_named_schedule_is_scored():
    found = build_schedule("1f1b", stages(), None, {}, None)
    assert found.schedule.name == "1f1b"
    assert found.result.makespan == 15.0  # (4 + 1) · 3
    assert tuple(found.result.peak_memory) == (2, 1)


@pytest.mark.parametrize(
    ("name", "chunks", "scales", "wanted"),
    [
        ("1f1b", None, None, 1), ("interleaved-1f1b", None, None, 2), ("interleaved-1f1b", 3, None, 3),
        ("interleaved-1f1b", None, (1.0,) * 6, 3), ("zb-v", None, None, 2),
    ],
)  # fmt: skip
def test_chunks_are_given_or_follow_from_the_factors_or_are_the_usual_ones(name, chunks, scales, wanted):
    assert build_schedule(name, stages(scales), chunks, {}, None).problem.chunks == wanted


def test_parameters_are_those_of_the_schedule():
    assert "group_size=1" in build_schedule("gis", stages(), None, {"group_size": 1}, None).schedule.name
    with pytest.raises(RequestError, match="--group-size is no parameter of 1f1b: leave it out, or name the schedule"):
        build_schedule("1f1b", stages(), None, {"group_size": 2}, None)
    with pytest.raises(RequestError, match="--group-size is no parameter of auto"):
        build_schedule("auto", stages(), None, {"group_size": 2}, None)
    with pytest.raises(RequestError, match="1f2b"):
        build_schedule("1f2b", stages(), None, {}, None)


def test_limit_is_refused_with_the_device_the_action_and_the_excess():
    with pytest.raises(
        InfeasibleError,
        match="gpipe holds 4 on device 0 at 0F3, 1 over the limit of 3: raise --memory-limit to 4, or let auto find",
    ):
        build_schedule("gpipe", stages(), None, {}, 3)
    assert build_schedule("gpipe", stages(), None, {}, 4).schedule.name == "gpipe"


def test_limit_is_in_saved_tensors_of_a_whole_device():
    found = build_schedule("interleaved-1f1b", stages(), 2, {}, 3)
    assert max(found.result.peak_memory) <= 6


@pytest.mark.parametrize(("name", "parameter", "value", "wanted"), [
    ("looped", "microbatches_per_loop", [0], "a whole number"),
    ("looped", "microbatches_per_loop", {"a": 1}, "a whole number"),
    ("looped", "microbatches_per_loop", "looped", "a whole number"),
    ("looped", "microbatches_per_loop", True, "a whole number"),
    ("gis", "group_size", 1.5, "a whole number"),
    ("looped", "run_ahead", 3, "a list, each a whole number"),
    ("looped", "run_ahead", ["3", 4], "a list, each a whole number"),
    ("auto", "seed", "1", "a whole number"),
    ("auto", "evaluations", None, "a whole number"),
    ("auto", "seconds", "nan", "a number"),
])  # fmt: skip
def test_value_of_another_type_than_the_parameter_is_refused(name, parameter, value, wanted):
    with pytest.raises(RequestError, match=f"^{parameter} of '{name}' is {re.escape(repr(value))}: give {wanted}$"):
        build_schedule(name, stages(), None, {parameter: value}, None)
