"""Offsets between the clocks of ranks."""

from hypothesis import given
from hypothesis import strategies as st
from panpipe.runtimes.launch.rank_team import offset_of

from ...support.launch import results

trips = st.tuples(st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 10**6))


@given(rounds=st.lists(trips, min_size=1, max_size=8), offset=st.integers(-(10**12), 10**12))
def test_offset_is_wrong_by_half_of_the_shortest_round_trip_at_most(rounds, offset):
    readings = [(start, start + there + offset, start + there + back) for there, back, start in rounds]
    shortest = min(there + back for there, back, _ in rounds)
    found = offset_of(readings)
    assert abs(found - offset) <= shortest + 1
    assert found == 0 or abs(found - offset) <= shortest / 2 + 1
    if offset == 0:
        assert found == 0


def test_traces_of_ranks_with_other_clocks_have_one_time_axis(tmp_path):
    """The second host was started 1,000 s earlier."""
    first, second = results("shifted", tmp_path)
    assert first == second
    assert first["step_s"] < 100
    ends = {(device, action): end for device, action, _, end in first["events"]}
    starts = {(device, action): start for device, action, start, _ in first["events"]}
    slack_s = 0.05  # half of a round trip of sockets, on a busy machine
    for microbatch in range(4):
        assert starts[1, f"1F{microbatch}"] >= ends[0, f"0F{microbatch}"] - slack_s
        assert starts[0, f"0B{microbatch}"] >= ends[1, f"1B{microbatch}"] - slack_s
