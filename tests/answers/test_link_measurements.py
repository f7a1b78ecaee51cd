"""Messages between devices, measured: every pair, direction and group; rates, rounds, disturbances; what is refused."""

import pytest
import torch
from panpipe.answers.profile_links import TOGETHER_BYTES, measure_links, total_rate
from panpipe.core.cluster.links.shared import groups_to_measure
from panpipe.core.errors import RequestError
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.profile.measured_cluster import rounds, undisturbed

CPU = torch.device("cpu")


def test_every_pair_direction_and_group_is_measured():
    groups = groups_to_measure(["host"] * 3)
    found = measure_links(ThreadTeam(3), lambda _: CPU, groups, (64, 1 << 16), 2)
    assert list(found.alone) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert all(list(times) == [64, 1 << 16] and min(times.values()) > 0 for times in found.alone.values())
    assert set(found.together) == set(groups)
    assert min(found.together.values()) > 0


def test_rate_of_flows_counts_until_the_first_ends():
    first, second = [1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 5.0, 9.0]
    assert total_rate([first]) == TOGETHER_BYTES
    assert total_rate([first, second], 10) == pytest.approx((4 + 2.5) * 10 / 4)


@pytest.mark.parametrize(("repeats", "shared"), [(1, [1]), (3, [1, 1, 1]), (20, [5, 5, 5, 5]), (22, [6, 6, 5, 5])])
def test_sizes_are_measured_in_turns(repeats, shared):
    assert rounds(repeats) == shared


def test_a_disturbance_of_half_the_rounds_changes_no_time():
    quiet = [1.0, 1.01, 1.02, 1.03, 1.04] * 2
    assert undisturbed([*quiet, *(50 * time for time in quiet)]) == pytest.approx(1.02, abs=0.021)
    assert undisturbed([3.0]) == 3.0


def test_one_device_is_refused():
    with pytest.raises(RequestError, match="there is 1 device, and so no link"):
        measure_links(ThreadTeam(1), lambda _: CPU, [])
