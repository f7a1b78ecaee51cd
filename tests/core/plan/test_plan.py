"""Plan documents: round trip, identity, and everything that a file can have wrong."""

import json

import pytest
from attrs import evolve
from panpipe.core.actions import parse_action
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.costs import StageCosts, StageEdge
from panpipe.core.errors import RequestError
from panpipe.core.plan.plan import (
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

from ...support.plans import scheduled

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

CLUSTER = fully_connected(4, 100, 2.0, 0.25)


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
    path.write_text(plan_json(PLAN), encoding="utf-8")
    assert read_plan(path) == PLAN
    assert plan_json(read_plan(path)) == path.read_text(encoding="utf-8")


def test_interval_is_written_if_known_and_readings_of_older_files_are_not_read():
    assert "interval_s" not in plan_json(PLAN)
    known = evolve(PLAN, prediction=evolve(PLAN.prediction, interval_s=(9.0, 10.0)))
    assert parse_plan(plan_json(known), "plan.json") == known
    assert known.hash == PLAN.hash
    older = json.loads(plan_json(known))
    older["prediction"] |= {"reference_s": 0.0125, "rehearsed_s": 9.25}
    assert parse_plan(json.dumps(older), "plan.json") == known
    older["prediction"]["other_s"] = 1.0
    with pytest.raises(RequestError, match="other_s"):
        parse_plan(json.dumps(older), "plan.json")


def test_hash_does_not_depend_on_the_prediction():
    assert evolve(PLAN, prediction=None).hash == PLAN.hash
    assert evolve(PLAN, schedule="gpipe").hash != PLAN.hash


def test_newer_plan_format_is_refused_with_the_supported_one():
    assert "reads version 1" in refused(lambda d: d.update(format="panpipe.plan/2"))


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
        (lambda d: d["prediction"]["costs"][1].update(optimizer_s=4e7), "optimizer_s of stage 1 is 4e+07 s, more than"),
        (lambda d: d["prediction"]["costs"][0].update(backward_s=-1), "backward_s of stage 0 is -1"),
    ],
    ids=["unknown", "unknown inside", "missing", "missing inside", "no number", "no list", "null", "years", "negative"],
)
def test_a_field_that_is_wrong_is_named(change, word):
    assert word in refused(change)


# The mesh


def test_a_cluster_is_arranged_in_the_order_of_ranks():
    cluster = fully_connected(5, 100, 2.0, 0.25)
    assert Mesh(2, 2).arrange(cluster) is cluster
    arranged = Mesh(2, 2, ((3, 1), (0, 2))).arrange(cluster)
    assert [device.name for device in arranged.devices] == ["device3", "device1", "device0", "device2", "device4"]
    assert arranged.path(0, 2) == cluster.path(3, 0)


def test_memory_of_a_position_is_that_of_the_replica_that_has_least():
    devices = tuple(
        evolve(device, memory_bytes=size) for device, size in zip(CLUSTER.devices, (8, 5, 6, 7), strict=True)
    )
    assert Mesh(2, 2).memory_bytes(evolve(CLUSTER, devices=devices)) == (6, 5)
    assert Mesh(2, 2, ((1, 0), (3, 2))).memory_bytes(evolve(CLUSTER, devices=devices)) == (5, 6)


@pytest.mark.parametrize(
    ("mesh", "rule"),
    [
        (Mesh(0, 1), "the mesh is 0 × 1: both must be at least 1"),
        (Mesh(2, 0), "the mesh is 2 × 0: both must be at least 1"),
        (Mesh(2, 2, ((0, 1),)), r"replicas of \[2\] devices: give 2 replicas of 2 each"),
        (Mesh(2, 2, ((0, 1), (2,))), r"replicas of \[2, 1\] devices: give 2 replicas of 2 each"),
        (Mesh(2, 2, ((0, 1), (2, 1))), "device 1 twice: a device has one position in one replica"),
        (Mesh(2, 1, ((0, -1),)), "device -1: numbers start at 0"),
        (Mesh(2, 1, ((0, 4),)), "uses device 4, counted from 0, and the cluster has 4"),
        (Mesh(2, 3), "needs 6 devices and the cluster has 4"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(mesh, rule):
    with pytest.raises(RequestError, match=rule):
        mesh.arrange(CLUSTER)


@pytest.mark.slow
def test_the_largest_plan_that_is_written_is_read_again(tmp_path):
    plan = scheduled("1f1b", 512, 4096)
    (tmp_path / "plan.json").write_text(plan_json(plan), encoding="utf-8")
    assert (tmp_path / "plan.json").stat().st_size > 40e6
    assert read_plan(tmp_path / "plan.json") == plan
