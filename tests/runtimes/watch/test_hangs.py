"""Ranks that hang are named by all the others within the limit, and devices of one process too. Real processes."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ...support.launch import SHARED, alone

TIMEOUT_S = 2.0
OTHER_METHODS = "every rank of a pipeline must take the same batches and call the same methods in the same order"


def assert_named(folder, hang, said, *, victim=1, ranks=2, timeout_s=TIMEOUT_S, calm=(), **options):
    """All ranks end, and those that do not hang say who waits for whom, and what the victim did last.

    Args:
        hang: what the victim does.
        said: a pattern in the reason of all ranks.
        calm: ranks that end in order.
    """
    done = alone(
        "hanging", folder, ranks, PANPIPE_TIMEOUT_S=str(timeout_s), HANG=hang, VICTIM=str(victim),
        **{"STOPPED_S": "12", **options},
    )  # fmt: skip
    for rank, one in enumerate(done):
        if rank in calm:
            assert one.returncode == 0, (rank, one.stderr)
            continue
        assert one.returncode == 1, (rank, one.stderr)
        if not (hang.startswith("stopped") and rank == victim):  # the others have ended when it continues
            assert re.search(said.format(victim=victim), one.stderr), (rank, one.stderr)


IN_LOOP = r"rank {victim} has been outside of panpipe after step 2 for [\d.]+ s, line hangs.py:\d+ in "
STOPPED = r"rank {victim} gave no sign of life for [\d.]+ s and was last seen "


def test_rank_in_an_endless_loop_of_the_users_code_is_named_with_its_line(tmp_path):
    assert_named(tmp_path, "loops", r"waited [\d.]+ s for rank 1 in step 3 at 0B0; " + IN_LOOP + "endless_loop")


@pytest.mark.slow
def test_stopped_rank_0_which_hosts_the_store_is_named(tmp_path):
    assert_named(tmp_path, "stopped", STOPPED, victim=0, STOPPED_S="6")


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(("hang", "said"), [
    ("loops", IN_LOOP + "endless_loop"),
    ("sleeps", IN_LOOP + "sleeps"),
    ("loads", IN_LOOP + "loads"),
    ("loops_in_forward", r"{victim} has been in step 3 at {victim}F0 for [\d.]+ s, line hangs.py:\d+ in endless_loop"),
    ("raises_and_catches", "rank 1 has a batch with other leaves than rank 0"),
    ("stopped", STOPPED),
    ("stopped_in_action", STOPPED),
    ("evaluates", OTHER_METHODS + "|is in another method than"),
    ("checkpoints", OTHER_METHODS),
])  # fmt: skip
def test_rank_that_hangs_while_the_others_step_is_named(tmp_path, hang, said, victim):
    assert_named(tmp_path, hang, said, victim=victim)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("meanwhile", ["evaluates", "checkpoints", "saves"])
@pytest.mark.parametrize(("hang", "said"), [("loops", IN_LOOP), ("stopped", STOPPED)])
def test_rank_that_hangs_while_the_others_evaluate_or_write_is_named(tmp_path, hang, said, meanwhile, victim):
    assert_named(tmp_path, hang, said, victim=victim, MEANWHILE=meanwhile)


@pytest.mark.slow
@pytest.mark.parametrize(("hang", "meanwhile"), [("evaluates", "checkpoints"), ("saves", "evaluates")])
@pytest.mark.parametrize("victim", [0, 1])
def test_ranks_in_another_order_of_methods_are_named(tmp_path, hang, meanwhile, victim):
    assert_named(tmp_path, hang, "rank 0.*rank 1|rank 1.*rank 0", victim=victim, MEANWHILE=meanwhile)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("hang", ["ends", "ends_and_sleeps"])
def test_rank_with_fewer_batches_is_named_by_the_others_and_ends_in_order(tmp_path, hang, victim):
    assert_named(tmp_path, hang, "rank {victim} has closed its pipeline", victim=victim, calm=(victim,))


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize(
    ("hang", "said"), [("loops_in_forward", "rank {victim} has been in step 3"), ("stopped", STOPPED)]
)
def test_rank_at_the_end_of_a_chain_is_named_by_all(tmp_path, hang, said, victim):
    assert_named(tmp_path, hang, said, victim=victim, ranks=3)


@pytest.mark.slow
@pytest.mark.parametrize(("limit_s", "hang", "meanwhile"), [
    ("2", "pauses", "pauses"),  # all ranks, between steps, for longer than the limit
    ("6", "stopped", "steps"),  # one rank, for a part of the limit
    ("2", "slow_actions", "slow_actions"),  # every action takes a third of the limit, and the step several times
])  # fmt: skip
def test_pauses_of_all_ranks_short_stops_and_long_steps_are_no_hangs(tmp_path, limit_s, hang, meanwhile):
    options = {"HANG": hang, "MEANWHILE": meanwhile, "VICTIM": "1", "STOPPED_S": "2"}
    for rank, one in enumerate(alone("hanging", tmp_path, 2, PANPIPE_TIMEOUT_S=limit_s, **options)):
        assert (rank, one.returncode, one.stderr) == (rank, 0, "")


@pytest.mark.slow
def test_device_of_one_process_that_hangs_is_named_and_the_process_ends(tmp_path):
    script = Path(__file__).parents[2] / "support" / "ranks" / "hanging_thread.py"
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(script)], env={**os.environ, **SHARED, "PANPIPE_TIMEOUT_S": "2"}, capture_output=True,
        text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert re.search(
        r"WorkerError: device 0 waited [\d.]+ s for device 1 in step 2 at 0B0; device 1 has been in step 2 at 1F0 for "
        r"[\d.]+ s, line hanging_thread.py:\d+ in endless_loop: see what it does there",
        done.stderr,
    ), done.stderr
    assert time.monotonic() - begun < 120


@pytest.mark.slow
def test_job_goes_on_while_strangers_connect_to_all_its_ports(tmp_path):
    for rank, one in enumerate(alone("hanging", tmp_path, 2, PANPIPE_TIMEOUT_S="60", HANG="visits",
                                     MEANWHILE="is_visited", VICTIM="1")):  # fmt: skip
        assert (rank, one.returncode) == (rank, 0), one.stderr


@pytest.mark.slow
def test_sigusr1_prints_where_every_rank_is(tmp_path):
    """Of a rank whose main thread waits inside a call of C++."""
    done = alone("hanging", tmp_path, 2, PANPIPE_TIMEOUT_S="20", HANG="signals", VICTIM="1")
    assert re.search(r"rank 0 \(stage 0\) has waited [\d.]+ s for rank 1 in step 3 at 0B0", done[0].stderr)
    assert re.search(r"rank 1 \(stage 1\) has been outside of panpipe after step 2 for [\d.]+ s", done[0].stderr)
    assert signal.SIGUSR1.name not in done[0].stderr
    assert done[0].returncode == 0
