"""Offsets between the clocks of ranks."""

from ...support.launch import results


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
