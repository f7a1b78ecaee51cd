"""Uniform stages: the costs of a device divided over its stages."""

import pytest
from panpipe.answers.uniform import UniformStages, equal_stages, numbers, uniform_times
from panpipe.core.costs.costs import StageCosts
from panpipe.core.errors import RequestError

TIMES = StageCosts(2.0, 4.0, 6.0, saved_bytes=1)


def test_costs_of_a_device_are_split_over_its_stages():
    half, whole = StageCosts(1.0, 2.0, 3.0, saved_bytes=1), StageCosts(2.0, 4.0, 6.0, saved_bytes=1)
    assert equal_stages((0, 1, 0), TIMES) == (half, whole, half)
    problem = UniformStages(2, 5, TIMES, (1.0, 2.0, 1.0, 1.0), 0.5, host_copy=4.0).problem(2, 3)
    assert [cost.forward_s for cost in problem.costs] == [1.0, 2.0, 1.0, 1.0]
    assert (problem.devices, problem.microbatches, problem.hop_s, problem.memory_limit) == (2, 5, 0.5, 6)


def test_backward_takes_the_time_of_the_forward_by_default():
    assert uniform_times(2.0, None, None, 0.25) == StageCosts(2.0, 2.0, 2.0, saved_bytes=1, freed_by_input_bytes=0.25)
    assert uniform_times(2.0, 1.0, 0.0, 0).backward_weight_s == 0.0


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((-1, None, None, 0), "--forward is -1: "),
        ((1, float("inf"), None, 0), "--backward-input is inf: "),
        ((1, None, float("nan"), 0), "--backward-weight is nan: "),
        ((1, None, None, 1.5), "--freed-by-input is 1.5: "),
    ],
)
def test_time_or_share_out_of_range_is_refused(given, text):
    with pytest.raises(RequestError, match=text):
        uniform_times(*given)


def test_stages_without_a_factor_each_are_refused():
    stages = UniformStages(2, 4, TIMES, (1.0, 2.0, 1.0), 0.0)
    with pytest.raises(RequestError, match="--stage-scale has 3 factors: 2 devices with 1 chunks have 2 stages"):
        stages.problem(1, None)
    with pytest.raises(RequestError, match="--chunks is 0"):
        stages.problem(0, None)
    with pytest.raises(RequestError, match="--host-copy is -1"):
        UniformStages(2, 4, TIMES, None, 0.0, -1).problem(1, None)


@pytest.mark.parametrize(("count", "chunks"), [(None, ()), (2, (1,)), (4, (2,)), (3, (1,))])
def test_number_of_chunks_follows_from_the_factors(count, chunks):
    scales = None if count is None else (1.0,) * count
    assert UniformStages(2, 4, TIMES, scales, 0.0).chunks_by_scales == chunks


def test_numbers_of_an_option():
    assert numbers("--run-ahead", "3,2,0", int) == (3, 2, 0)
    for text, reason in (("3,x", "write numbers with commas"), ("1,-1", "has -1"), ("", "write numbers")):
        with pytest.raises(RequestError, match=f"--run-ahead .*{reason}"):
            numbers("--run-ahead", text, int)
    with pytest.raises(RequestError, match="has nan"):
        numbers("--stage-scale", "1,nan", float)
