"""Questions of the page: their command lines, keys, defaults, and what is refused."""

import pytest
from attrs import evolve
from panpipe.core.errors import RequestError
from panpipe.explore.question import (
    REQUEST_LIMITS,
    FileQuestion,
    PlanQuestion,
    UniformQuestion,
    key_of,
    parse_question,
    parse_request,
    plain_question,
)


def test_question_of_uniform_stages_is_a_command_line():
    asked_for = UniformQuestion(
        schedule="looped", devices=2, chunks=2, forward=1.5, memory_limit=3.0, parameters={"run_ahead": [4, 3]}
    )
    assert asked_for.command == (
        "panpipe schedule looped --devices 2 --microbatches 8 --chunks 2 --forward 1.5 --backward-input 1 "
        "--backward-weight 1 --memory-limit 3 --run-ahead 4,3"
    )
    assert UniformQuestion().command == "panpipe schedule 1f1b --devices 4 --microbatches 8"


def test_question_of_a_plan_is_a_command_line():
    assert PlanQuestion(model="my model:factory", rank=3).command == (
        "panpipe plan --model 'my model:factory' --cluster 4xA100-40GB --microbatches 8 --top 3"
    )
    without_ranks = PlanQuestion(model="llama-7b", microbatches=None, batch=16, tp_overlap="all", cp_order="contiguous")
    assert without_ranks.command == "panpipe plan --model llama-7b --batch 16 --cluster 4xA100-40GB"
    assert "--tp-overlap all" in evolve(without_ranks, tp=2).command
    assert FileQuestion(number=2).command == ""


def test_plain_question_has_what_is_not_at_its_default_and_is_read_again():
    for question in (UniformQuestion(devices=8, parameters={"seed": 3}), PlanQuestion(offload="auto"), FileQuestion()):
        assert parse_question(plain_question(question)) == question
    assert plain_question(UniformQuestion(devices=8)) == {"kind": "uniform", "devices": 8}
    assert key_of(UniformQuestion(devices=8)) != key_of(UniformQuestion(devices=9))
    assert key_of(UniformQuestion(comm=0.0)) == key_of(UniformQuestion())


def test_request_is_an_object_of_limited_size():
    assert parse_request(b'{"question": {"kind": "file"}}') == {"question": {"kind": "file"}}
    with pytest.raises(RequestError, match="it must be a JSON object"):
        parse_request(b"[1]")
    with pytest.raises(RequestError, match=f"at most {REQUEST_LIMITS.size} are read"):
        parse_request(b" " * (REQUEST_LIMITS.size + 1))
    with pytest.raises(RequestError, match="not a whole JSON file"):
        parse_request(b"{")
