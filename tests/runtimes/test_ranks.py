"""Ranks over gloo: real processes, forks of one that has imported everything, and some under torchrun."""

import itertools
import re
import signal
import time
from pathlib import Path

import pytest

from ..support.failures import FAILURES
from ..support.launch import alone, left_over, results, results_of, results_under_torchrun, torchrun
from ..support.parity import assert_equal, largest


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two ranks found in many jobs, one after another in the same processes."""
    jobs = (
        "parity", "lower", "ownership", "python", "shapes", "traced", "differing", "shuffled", "values", "holding",
        "averaging", "beginning", "replanned", "idle",
    )  # fmt: skip
    return results_of(jobs, tmp_path_factory.mktemp("two"))


def assert_parity(ranks: list[dict[str, dict[str, float]]], plans: int) -> None:
    """On every rank every case equals one process; ``plans`` is their number."""
    for found in ranks:
        assert len(found) == plans
        for distance in found.values():
            assert_equal(distance)


def test_two_ranks_train_as_one_process_does(two):
    assert_parity(two["parity"], 4)


@pytest.mark.slow
def test_ranks_under_torchrun_train_as_one_process_does(tmp_path):
    assert_parity(results_under_torchrun(["parity"], tmp_path)["parity"], 4)


def assert_idle(ranks):
    """Rank 0 has no stage, and takes part in everything else."""
    for found in ranks:
        assert found["losses"] == pytest.approx(found["alone"], abs=1e-12)
        assert found["again"][0] == found["again"][1]
        assert found["rows"] == 8
        assert 0 not in found["devices"]
    assert ranks[0]["here"] == 0
    assert all(found == ranks[0] | {"here": found["here"]} for found in ranks)


def test_rank_without_a_stage_takes_part_in_results_and_checkpoints(two):
    assert_idle(two["idle"])


@pytest.mark.slow
def test_rank_without_a_stage_next_to_two_with_stages(tmp_path):
    assert_idle(results("idle", tmp_path, 3))


def test_ranks_update_as_one_process_does_in_bf16_clipped_and_over_two_batches(two):
    first, second = (one["cases"] for one in two["lower"])
    for case, found in first.items():
        assert [mine for mine, _ in found["norm"]] == [mine for mine, _ in second[case]["norm"]]
        for mine, alone_norm in found["norm"]:
            assert mine == pytest.approx(alone_norm, rel=1e-5)
        assert largest([*found["distance"], *second[case]["distance"]]) < 1e-5
    assert any("torch.bfloat16" in found["dtypes"] for found in first.values())


def test_each_rank_holds_only_its_own_stages(two):
    first, second = two["ownership"]
    for found in (first, second):
        assert found["here"] == found["planned"]
        assert found["with state"] == len(found["here"])
    assert set(first["here"]) | set(second["here"]) == set(first["all"])
    assert set(first["here"]) & set(second["here"]) == {"embedding.weight"}  # tied: a replica in both


def test_untraced_regions_train_over_ranks_and_shapes(two):
    first, second = two["python"]
    for found in (first, second):
        assert largest(found["distance"]) < 1e-9
        assert found["regions"] == ["3", "the end of the step"]
    assert first["metrics"] == second["metrics"]


def test_ranks_change_shapes_together(two):
    first, second = two["shapes"]
    assert [first["here"], second["here"]] == [False, True]  # rows that are not wanted everywhere are of the last stage
    for found in (first, second):
        assert found["distance"] < 1e-9
        assert found["afterwards"] < 1e-9
        assert "is in another mode on rank 1 than on rank 0" in found["mode"]
    said = [text.split(" (")[0].split(":")[0] for text in first["said"]]
    assert {*said} <= {"microbatches of a new shape"}  # no third one of the two that are kept: sizes are symbols
    assert second["said"] == []
    assert first["failure"] == "RequestError: rank 1 cannot compile the step for this batch: ValueError: not here"
    assert second["failure"] == "ValueError: not here"


def test_every_rank_gets_the_whole_trace(two):
    first, second = two["traced"]
    assert first == second
    kinds = {(device, action[1:].rstrip("0123456789<>")) for device, _, action, *_ in first["events"]}
    assert {(0, "F"), (1, "F"), (0, "B"), (1, "B"), (0, "SEND_F"), (1, "RECV_F"), (1, "SEND_B")} <= kinds
    assert all(start <= end for *_, start, end in first["events"])


def test_ranks_with_different_arguments_are_all_refused(two):
    first, second = two["differing"]
    assert first == second
    for about, said in {
        "equal": "nothing",
        "seed": "rank 1 has seed=1 and rank 0 has seed=0: every rank must call panpipe.pipeline with the same",
        "absent": "rank 1 has no b and rank 0 has b=2",
        "lr": "rank 1 has lr of 'embedding.weight'=2 and rank 0 has lr of 'embedding.weight'=1: every rank",
        "frozen": "rank 1 has embedding.weight=32×16 torch.float32, frozen and rank 0 has embedding.weight=32×16 torch",
        "mode": "rank 1 has blocks.0.training=False and rank 0 has blocks.0.training=True",
        "rows": "rank 1 has a batch of 6 samples and rank 0 one of 8: the ranks of a pipeline compute parts of one",
        "values": "rank 1 has other values in batch['y'] than rank 0: the ranks of a pipeline compute parts of one",
        "afterwards": "nothing",
    }.items():
        assert first[about].startswith(said), first[about]


def assert_shuffled(found: dict[str, str], replica: str) -> None:
    """Batches in another order were refused in the same step, by name, and nothing was trained on them."""
    other = "rank 1 has other values in batch['x'] than rank 0: "
    for what in ("step", "evaluate", "new shape", "kept"):
        assert found[what].startswith(replica or other), (what, found[what])
    assert "no parameter was updated" in found["step"]
    assert (found["steps"], found["unchanged"], found["still unchanged"]) == ([1, 1], True, True)
    assert (found["afterwards"], found["trained"]) == ("nothing", True)


def test_a_batch_in_another_order_on_one_rank_is_refused_in_the_same_step(two):
    for found in two["shuffled"]:
        assert_shuffled(found, "")
        assert found["forward"] == found["evaluate"]


def test_a_parameter_of_another_rank_is_refused_by_name_between_steps(two):
    for rank, found in enumerate(two["holding"]):
        for use in ("average", "again"):
            assert found[use].startswith(
                f"'{found['name']}' is held by rank {1 - rank}, and this rank has only its shape: 'add_'"
            )
        assert found["text"].endswith(f"held by rank {1 - rank}>")


def test_each_rank_averages_what_it_holds_bit_for_bit(two):
    first, second = two["averaging"]
    for found in (first, second):
        assert found["equal"]
        assert found["refused"].startswith("the model has the values of an average")
        assert found["other loss"]
        assert found["same loss"]
        assert found["resumed"]
    both = set(first["names"]) & set(second["names"])
    assert both == {"embedding.weight"}
    assert first["noise"]["embedding.weight"] == second["noise"]["embedding.weight"]
    assert set(first["noise"]) == set(first["names"])


def test_ranks_that_begin_with_other_weights_are_refused_by_name(two):
    first, second = two["beginning"]
    assert first == second
    rule = ": all ranks must start with the same model; call torch.manual_seed with the same seed on every rank"
    assert (first["equal"], first["both meta"]) == ("nothing", "nothing")
    assert first["bit"].startswith(f"'position.weight' has other values on rank 1 than on rank 0{rule}")
    assert first["seed"].startswith("'embedding.weight' has other values on rank 1 than on rank 0, and so have ")
    assert first["meta"].startswith("'embedding.weight' has values on rank 0 and is on meta on rank 1, and so have ")


def test_ranks_that_begin_with_other_weights_train_after_resume_alone(two):
    (found, _), (resumed, _) = two["beginning"], two["holding"]
    assert found["seed"].endswith(", or call resume() before the first step")
    assert {found[what] for what in ("step", "evaluate", "save", "checkpoint")} == {found["seed"]}
    assert found["loss"] == resumed["loss"]


def test_ranks_that_change_what_the_step_reads_into_different_values_are_refused(two):
    for found in two["values"]:
        said = found["rate 0"]
        assert said.startswith("other values that the step reads changed on rank 1 than on rank 0: on rank "), said
        assert re.search(r"'model\.blocks\.\d\.dropout', which was", said), said
        assert (found["rate 1"], found["steps"]) == ("nothing", 2)


@pytest.mark.slow
def test_rank_that_alone_changes_what_the_step_reads_names_the_value(tmp_path):
    for one in alone("apart_in_values", tmp_path):
        assert one.returncode == 1
        assert "other values that the step reads changed on rank 1 than on rank 0: on rank 1 " in one.stderr
        assert "which was 0.1 and is 0.35" in one.stderr


@pytest.mark.slow
def test_a_rank_whose_batch_has_another_shape_names_itself(tmp_path):
    for one in alone("apart_in_shapes", tmp_path):
        assert one.returncode == 1
        assert "rank 1 has a batch of 6 samples and rank 0 one of 8" in one.stderr


def test_error_of_the_users_code_is_reported_to_the_other_ranks(tmp_path):
    left, stopped = alone("raising", tmp_path, OUTSIDE="an OSError")
    assert (left.returncode, stopped.returncode) == (1, 1)
    assert "rank 1 stopped: OSError: no such sample" in left.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a surrogate", "no message", "a huge message", "a cyclic cause", "NothingFits"])
def test_rank_that_raises_what_cannot_be_printed_or_pickled_is_named_by_the_others(tmp_path, name):
    left, stopped = alone("raising", tmp_path, OUTSIDE=name)
    assert (left.returncode, stopped.returncode) == (1, 1)
    assert f"rank 1 stopped: {type(FAILURES[name]()).__name__}: " in left.stderr
    assert len(left.stderr) < 20_000


def test_when_one_rank_fails_the_others_stop_and_name_it(tmp_path):
    left, stopped = alone("raising", tmp_path)
    assert (left.returncode, stopped.returncode) == (1, 1)
    assert "rank 1 stopped" in left.stderr


def test_torchrun_ends_when_a_rank_is_killed(tmp_path):
    done = torchrun("dying", tmp_path, VICTIM="1", WHERE="F")
    assert done.returncode != 0
    assert "SIGKILL" in done.stderr
    assert left_over(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize(("absent", "said"), [(1, "rank 1 of 3"), (0, "rank 0")])
def test_a_rank_that_never_arrives_is_named(tmp_path, absent, said):
    for one in alone("traced", tmp_path, 3, absent=(absent,), PANPIPE_TIMEOUT_S="3"):
        assert one.returncode == 1
        assert f"panpipe: {said} did not arrive within 3 s" in one.stderr
        assert "Traceback" not in one.stderr


def assert_all_name(victim: int, folder: Path, job: str, ranks: int = 2, **options: str) -> None:
    """All ranks but a killed one end with its name, within 10 s of that on a quiet machine.

    Transports alone wait for minutes. How slow this machine is now shows in how long the ranks took until then.
    """
    begun = time.time()
    done = alone(job, folder, ranks, **options)
    ended = time.time()
    assert (folder / "killed").exists(), [one.stderr[-1000:] for one in done]
    killed = (folder / "killed").stat().st_mtime
    for rank, one in enumerate(done):
        if rank == victim:
            assert one.returncode == -signal.SIGKILL
        else:
            assert one.returncode == 1
            assert f"rank {victim} stopped" in one.stderr, one.stderr
            [line] = [line for line in one.stderr.splitlines() if "warn" not in line.lower()]
            assert "gloo" not in line, line
    assert ended - killed < 10 + 3 * (killed - begun)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["F", "B", "STEP"])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_killed_inside_a_step_is_named_by_all_the_others(tmp_path, victim, where):
    assert_all_name(victim, tmp_path, "dying", 3, VICTIM=str(victim), WHERE=where)


@pytest.mark.parametrize(
    ("mesh", "ranks", "victim", "where"),
    [
        ("pp=2", 2, 1, "B"),
        *(pytest.param("pp=3", 3, victim, "F", marks=pytest.mark.slow) for victim in range(3)),
        pytest.param("pp=2,dp=2", 4, 2, "REDUCE", marks=pytest.mark.slow),
    ],
)
def test_transport_that_would_wait_forever_for_a_killed_rank_ends_with_its_name(tmp_path, mesh, ranks, victim, where):
    """As NCCL does. No call of the transport fails; all ranks of the host see that its process ended."""
    assert_all_name(
        victim, tmp_path, "dying", ranks, backend="endless-waits", MESH=mesh, VICTIM=str(victim), WHERE=where
    )


def test_a_rank_killed_while_another_one_plans_is_named(tmp_path):
    assert_all_name(1, tmp_path, "thinking")


@pytest.mark.slow
def test_ranks_that_leave_after_a_killed_rank_are_not_named(tmp_path):
    """The first of them without closing anything: it ends as it is through."""
    for rank, one in enumerate(alone("leaving", tmp_path, 3, backend="endless-waits")):
        assert (rank, one.returncode, one.stderr) == (rank, 0, "")


@pytest.mark.parametrize(
    ("mesh", "ranks", "victim", "where"),
    [
        ("pp=2,dp=2", 4, 3, "REDUCE"),
        *(
            pytest.param("pp=2,dp=2", 4, victim, where, marks=pytest.mark.slow)
            for victim, where in itertools.product((0, 1), ("F", "B", "REDUCE", "STEP", "EVALUATE"))
        ),
        pytest.param("pp=1,dp=3", 3, 1, "REDUCE", marks=pytest.mark.slow),
        pytest.param("dp=3,pp=1", 3, 0, "REDUCE", marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_of_one_replica_is_named_by_all_replicas(tmp_path, mesh, ranks, victim, where):
    assert_all_name(victim, tmp_path, "dying", ranks, MESH=mesh, VICTIM=str(victim), WHERE=where)


@pytest.mark.slow
def test_paused_rank_names_the_killed_rank(tmp_path):
    """Rank 0 keeps the store: gone before rank 1 had looked there, it was taken for the one that was killed."""
    assert_all_name(2, tmp_path, "dying", 3, VICTIM="2", WHERE="B", STARVED="1")


@pytest.mark.slow
def test_a_rank_killed_while_the_others_wait_in_a_collective_is_named(tmp_path):
    left, killed, other = alone("gathering", tmp_path, 3)
    assert killed.returncode == -signal.SIGKILL
    for one in (left, other):
        assert one.returncode == 1
        assert "rank 1 stopped answering" in one.stderr


def assert_moves_change_no_bits(found: list[dict]) -> None:
    """Losses, norms, weights, optimizer state and averages of all ranks together are those without moves."""
    for name in found[0]:
        bits: dict[str, dict] = {"moved": {}, "kept": {}}
        for one in (ranks[name] for ranks in found):
            for way, known in bits.items():
                assert all(known.setdefault(key, value) == value for key, value in one[way]["bits"].items())
            for what in ("losses", "norm", "rates", "counts"):
                assert one["moved"][what] == one["kept"][what], (name, what)
        assert bits["moved"] == bits["kept"]
    assert any(one[name]["moved"]["stages"] != one[name]["kept"]["stages"] for one in found for name in one)


def test_stages_move_between_ranks_and_results_have_the_same_bits(two):
    assert_moves_change_no_bits(two["replanned"])


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "mesh"), [(3, "pp=3"), (4, "pp=2,dp=2")])
def test_stages_move_between_more_ranks_and_within_replicas(tmp_path, ranks, mesh):
    assert_moves_change_no_bits(results("replanned", tmp_path, ranks, MESH=mesh))
