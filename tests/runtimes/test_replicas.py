"""Replicas of a pipeline over gloo: four real processes equal one on all their batches."""

import json
import re
import subprocess
import sys

import pytest
from panpipe.core.policies.sharding import bucket_bytes

from ..support.launch import results, results_of, torchrun, torchrun_on_nodes
from ..support.parity import largest


def check(found: list[dict], places: list[list[int]]) -> None:
    """Every rank is where the mesh says, equal to one process, and to its replicas bit by bit."""
    assert [one["place"] for one in found] == places
    first = {position: one for one in found for replica, position in [one["place"]] if replica == 0}
    for one in found:
        same = first[one["place"][1]]
        for name, case in one["cases"].items():
            for distances in case["distances"]:
                assert largest(distances.values()) < 1e-9, (one["place"], name, distances)
                assert distances["gradient"] < 1e-12, (one["place"], name)
            assert case["bits"] == same["cases"][name]["bits"], (one["place"], name)
            assert case["metrics"] == found[0]["cases"][name]["metrics"]


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Two replicas of a pipeline of two: what several jobs find in one start."""
    jobs = (
        "replicas", "scaling", "not_finite", "monitored", "sharded_states", "scattered_schedules", "replanned_parted"
    )  # fmt: skip
    return results_of(jobs, tmp_path_factory.mktemp("four"), 4, MESH="pp=2,dp=2")


def test_replicas_train_like_one_process_on_all_their_batches(four):
    check(four["replicas"], [[0, 0], [1, 0], [0, 1], [1, 1]])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "places"), [("pp=1,dp=2", [[0, 0], [1, 0]]), ("pp=2,dp=2", [[0, 0], [1, 0], [0, 1], [1, 1]])]
)
def test_replicas_train_on_batches_of_other_lengths(tmp_path, mesh, places):
    check(results("lengths", tmp_path, len(places), MESH=mesh), places)


SKIPPED = [False, True, False, True, True, False, False]
"""Which of the updates in float16 are: those with an overflow in one stage of one replica, in either of two batches."""


def check_updates(found: list[dict]) -> None:
    """Every rank updates as one process does, and its replicas to the last bit."""
    first = {position: one for one in found for replica, position in [one["place"]] if replica == 0}
    for one in found:
        for name, case in one["cases"].items():
            assert all(mine == alone for mine, alone in (*case["skipped"], *case["scale"])), name
            for mine, alone in case["norm"]:
                assert mine == pytest.approx(alone, rel=1e-3, nan_ok=True), name
            # Over replicas batches of other sizes have other seeds, which float16 rounds in another way.
            assert largest(case["distance"]) < 1e-4, (name, case["distance"])
            assert case["bits"] == first[one["place"][1]]["cases"][name]["bits"], name


def check_scaled(found: list[dict]) -> None:
    """Scales and skipped updates are those that the batches say, on every rank."""
    check_updates(found)
    for one in found:
        half = one["cases"]["float16"]
        assert [mine for mine, _ in half["skipped"]] == SKIPPED
        assert half["updates"] == SKIPPED.count(False)
        assert [mine for mine, _ in half["scale"]] == [2.0**n for n in (10, 9, 9, 8, 7, 7, 8)]
        assert re.match(r"rank [12] has scaler=.* and rank 0 has scaler=", one["refusal"])


def test_clipping_accumulation_and_scaled_losses_over_replicas(four):
    check_scaled(four["scaling"])


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "ranks"), [("dp=2,pp=2", 4), ("pp=1,dp=2", 2), ("pp=2,dp=1", 2)])
def test_clipping_accumulation_and_scaled_losses_over_other_meshes(tmp_path, mesh, ranks):
    check_scaled(results("scaling", tmp_path, ranks, MESH=mesh))


@pytest.mark.slow
def test_clipping_and_accumulation_in_bf16_over_replicas(tmp_path):
    check_updates(results("lower", tmp_path, 4, MESH="pp=2,dp=2"))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["pp=2,dp=1", "pp=1,dp=2"])
def test_different_scales_on_replicas_end_all_ranks(tmp_path, mesh):
    done = torchrun("apart", tmp_path, 2, MESH=mesh)
    assert done.returncode != 0
    assert "the loss is scaled by 2 on this rank, and 2 ranks have the mean 513" in done.stderr
    assert "load the same state into the scaler of every rank" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "places"),
    [
        ("dp=2,pp=2", [[0, 0], [0, 1], [1, 0], [1, 1]]),
        ("pp=1,dp=2", [[0, 0], [1, 0]]),
        ("dp=3,pp=1", [[0, 0], [1, 0], [2, 0]]),
    ],
)
def test_other_meshes_train_like_one_process(tmp_path, mesh, places):
    check(results("replicas", tmp_path, len(places), MESH=mesh), places)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["pp=2,dp=2", "dp=2,pp=2"])
def test_the_dimension_written_first_runs_across_nodes(tmp_path, mesh):
    ranks = torchrun_on_nodes("nodes", tmp_path, 2, 2, MESH=mesh)
    assert [one["node"] for one in ranks] == [0, 0, 1, 1]
    for rank, one in enumerate(ranks):
        assert one["gpu"] == f"cuda:{one['local']}"
        assert one["local"] == rank % 2
        assert one["pipeline"] == ([0, 1] if mesh.startswith("pp") else [one["node"]] * 2)
        assert one["distance"] < 1e-9
    places = [[0, 0], [1, 0], [0, 1], [1, 1]] if mesh.startswith("pp") else [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert [one["place"] for one in ranks] == places


@pytest.mark.slow
def test_replicas_from_an_automatic_plan_to_a_trace_and_a_checkpoint(tmp_path):
    found = results("whole", tmp_path, 4, MESH="pp=2,dp=2")
    assert len({one["hash"] for one in found}) == 1
    for one in found:
        assert one["mesh"] == [[0, 2], [1, 3]]
        assert one["losses"] == found[0]["losses"]
        # A second pipeline, over torch's DeviceMesh, from the plan and the checkpoint: its forward is the first one's.
        assert abs(one["loaded"] - one["after"]) < 1e-6
        assert {(rank, "REDUCE_GRAD") for rank in range(4)} <= {tuple(kind) for kind in one["kinds"]}
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) == 2
    traces = {"measured": tmp_path / "measured.json", "predicted": tmp_path / "predicted.json"}
    cli = [sys.executable, "-m", "panpipe"]
    for command in (
        ["simulate", tmp_path / "plan.json", "--trace", traces["predicted"]],
        ["compare", traces["predicted"], traces["measured"], "--json"],
    ):
        done = subprocess.run([*cli, *map(str, command)], capture_output=True, text=True, check=False, encoding="utf-8")
        assert done.returncode == 0, done.stderr
    compared = json.loads(done.stdout)
    assert "REDUCE_GRAD" in {kind["kind"] for kind in compared["kinds"]}


def test_replicas_skip_a_loss_that_is_not_finite_together(four):
    """The loss of the second replica is not finite, and no other."""
    first = four["not_finite"][0]
    for one in four["not_finite"]:
        assert one["stages"] != first["stages"] or one["bits"] == first["bits"]
        assert one["skipped"] == [False, True, False]
        assert one["distance"] < 1e-6
        assert one["raised"] == first["raised"]
        assert one["raised"][1:] == [1, 2, 1]  # stage, microbatch, replica
        assert "microbatch 2 of replica 1 is not finite; that began in stage 1 on rank 3, with" in one["raised"][0]
        said, stage, changed = one["raised for the norm"]
        assert f"the gradient of 'root.shift' in stage {stage} is not finite; no parameter was updated" in said
        assert changed == []


def test_rank_of_the_first_device_gets_the_numbers_of_all_ranks(four):
    first, *others = four["monitored"]
    assert all(other["reports"] == [] for other in others)
    for number, report in enumerate(first["reports"], 1):
        assert (report["step"], report["rows"]) == (number, 16)
        places = [(d["rank"], d["replica"], d["device"], d["stages"]) for d in report["devices"]]
        assert places == [(0, 0, 0, [0]), (2, 0, 1, [1]), (1, 1, 0, [0]), (3, 1, 1, [1])]
        assert all(d["busy_s"] > 0 and d["messages"] == 4 for d in report["devices"])
    assert first["reports"][-1]["grad_norm"] == first["norm"]


def test_checkpoints_do_not_depend_on_sharding(four):
    for one in four["sharded_states"]:
        assert largest(one["far"].values()) < 1e-9, one["far"]
        assert one["evaluated"] < 1e-9


def test_each_of_two_replicas_holds_half_of_the_optimizer_state_and_of_shared_parameters(four):
    for one in four["sharded_states"]:
        whole, parameters, _ = one["held"]["none"]
        assert whole == 2 * parameters
        for level in ("optimizer", "gradients", "parameters"):
            part, same, _ = one["held"][level]
            assert same == parameters if level != "parameters" else same == pytest.approx(parameters / 2, rel=0.02)
            assert part == pytest.approx(whole / 2, rel=0.02)


def test_each_of_two_replicas_holds_half_of_the_gradients_and_two_slots(four):
    for one in four["sharded_states"]:
        _, parameters, gradients = one["held"]["optimizer"]
        assert gradients == pytest.approx(parameters, rel=0.01)
        most = max(one["largest"], bucket_bytes(parameters))
        for level in ("gradients", "parameters"):
            assert one["held"][level][2] <= 1.02 * (parameters / 2 + 2 * most)


def test_each_of_two_replicas_holds_half_of_the_frozen_parameters(four):
    for one in four["sharded_states"]:
        for level, found in one["frozen"].items():
            assert found["far"] < 1e-9, level
        held = {level: found["held"] for level, found in one["frozen"].items()}
        assert held["gradients"] == held["none"]
        assert held["parameters"] == pytest.approx(held["none"] / 2, rel=0.001)


def test_parameters_that_are_unfrozen_between_steps_are_shared(four):
    for one in four["sharded_states"]:
        assert one["unfrozen"]["parameters"] < 1e-9


def test_evaluations_hold_the_parameters_of_one_stage_at_a_time(four):
    for one in four["sharded_states"]:
        found = one["evaluations"]
        assert largest(found["far"].values()) < 1e-12, found["far"]
        first, second = (0, 3) if one["evaluations"]["actions"][0].startswith("0") else (1, 2)
        assert found["actions"] == [f"{stage}{kind}0" for stage in (first, second) for kind in ("UNSHARD", "RESHARD")]


def test_plan_with_one_sharded_stage_gathers_that_stage_alone(four):
    for one in four["sharded_states"]:
        found = one["partly"]
        assert found["optimizer"]["actions"] == ["1UNSHARD"]
        assert found["gradients"]["actions"] == ["1SCATTER_GRAD0", "1SCATTER_GRAD1", "1UNSHARD"]
        within = ["1RESHARD0", "1SCATTER_GRAD0", "1SCATTER_GRAD1", "1UNSHARD0"]
        assert found["parameters"]["actions"] == within
        assert largest(each["partly"] for each in found.values()) < 1e-9


def test_split_backwards_and_uneven_microbatches_of_replicas_that_share_gradients_or_parameters(four):
    for one in four["scattered_schedules"]:
        assert len(one["schedules"]) == 2 * 2  # share gradients, or parameters: in short and in long runs in turns
        for name, distances in one["schedules"].items():
            assert largest(distances) < 1e-9, (name, distances)


def test_stages_move_while_replicas_share_parameters(four):
    for one in four["replanned_parted"]:
        assert set(one) == {"first", "in a v", "then gradients"}
        assert largest(one.values()) < 1e-9, one


def test_shared_gradients_that_the_user_clears_reads_or_replaces_are_refused(four):
    for one in four["scattered_schedules"]:
        for level, found in one["cleared"].items():
            assert found.pop("nothing") == "nothing"
            for name in ("zero_grad", "to zero"):
                assert "zero_grad() cleared the gradients" in found.pop(name), (level, name)
            assert len(found) == {"optimizer": 1, "gradients": 3, "parameters": 3}[level]
            refused = ["which waits for an update, would be lost or wrong: with shard="]
            refused += ["is held by the replicas, each of which has a part between steps"] * (level == "parameters")
            for text in found.values():
                assert any(each in text for each in refused)
