"""Plan documents: round trip, identity, and everything that a file can have wrong."""

import json

import pytest
from attrs import evolve
from panpipe.core.actions import parse_action
from panpipe.core.cluster import fully_connected
from panpipe.core.costs import StageCosts, StageEdge
from panpipe.core.errors import RequestError
from panpipe.core.plan import (
    MemoryPolicy,
    Mesh,
    Plan,
    Prediction,
    Stage,
    TiedWeight,
    parse_plan,
    plan_json,
    read_plan,
)

PLAN = Plan(
    model="two",
    graph_hash="0" * 64,
    mesh=Mesh(2),
    microbatches=1,
    schedule="1f1b",
    stages=(Stage(0, 0, ("a", "b"), ("w",)), Stage(1, 1, ("c",), ("w",))),
    edges=(StageEdge(0, 1, 8, 4),),
    device_actions=tuple(tuple(map(parse_action, row)) for row in (["0F0", "0B0"], ["1F0", "1I0", "1W0"])),
    tied=(TiedWeight("w", (0, 1), 16),),
    memory=MemoryPolicy(recompute=(1,)),
    prediction=Prediction(
        costs=(StageCosts(1.0, 2.0, 0.5), StageCosts(1.0, 1.0, 1.0, backward_s=1.5)),
        cluster=fully_connected(2, 100, 2.0, 0.25),
        step_s=9.5,
        peak_memory_bytes=(10.0, 20.0),
        peak_saved_bytes=(5.0, 6.0),
        bubble_ratio=0.5,
        evaluations=3,
    ),
)


def refused(change):
    data = json.loads(plan_json(PLAN))
    change(data)
    with pytest.raises(RequestError) as caught:
        parse_plan(json.dumps(data), "plan.json")
    message = str(caught.value)
    assert message.startswith("plan.json ")
    assert "\n" not in message
    return message


def test_round_trip_gives_the_same_plan_and_bytes(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(plan_json(PLAN))
    assert read_plan(path) == PLAN
    assert plan_json(read_plan(path)) == path.read_text()


def test_actions_are_written_in_the_grammar():
    assert json.loads(plan_json(PLAN))["device_actions"] == [["0F0", "0B0"], ["1F0", "1I0", "1W0"]]


def test_a_plan_without_prediction_is_whole():
    bare = evolve(PLAN, prediction=None)
    assert parse_plan(plan_json(bare), "plan.json") == bare


def test_the_prediction_is_no_part_of_the_identity():
    assert evolve(PLAN, prediction=None).hash == PLAN.hash
    assert evolve(PLAN, schedule="gpipe").hash != PLAN.hash


def test_placement_and_stages_of_a_device():
    assert PLAN.placement == (0, 1)
    assert PLAN.devices == 2
    assert PLAN.stages_on(1) == (PLAN.stages[1],)


def test_a_truncated_file_says_where():
    with pytest.raises(RequestError, match=r"^plan.json is not a whole JSON file \(line \d+"):
        parse_plan(plan_json(PLAN)[:-30], "plan.json")


def test_a_newer_version_says_which_is_read():
    assert "reads version 1" in refused(lambda d: d.update(format="panpipe.plan/2"))


def test_another_document_is_told_apart():
    assert "not a panpipe.plan file" in refused(lambda d: d.update(format="panpipe.opgraph/1"))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda d: d.update(colour="red"), "colour"),
        (lambda d: d["stages"][0].update(speed=1), "speed"),
        (lambda d: d.pop("microbatches"), "microbatches"),
        (lambda d: d["stages"][0].pop("nodes"), "nodes"),
        (lambda d: d.update(microbatches="many"), "microbatches"),
        (lambda d: d.update(device_actions=7), "device_actions"),
        (lambda d: d["edges"][0].update(bytes=None), "bytes"),
    ],
    ids=["unknown", "unknown inside", "missing", "missing inside", "no number", "no list", "null"],
)
def test_a_field_that_is_wrong_is_named(change, word):
    assert word in refused(change)


@pytest.mark.parametrize("text", ["0F0junk", "F0", "0X1", "0F", "0STEP1", "0F0>1", ""])
def test_a_hand_edited_action_is_refused(text):
    message = refused(lambda d: d["device_actions"][0].insert(0, text))
    assert f"'{text}' is not an action" in message
