"""Copies with their positions in the compute order."""

import pytest
from panpipe.core.actions import parse_action
from panpipe.core.evaluate.host_queue import TimedCopy
from panpipe.core.offload.host_links import HostLink, same_links, timed_copies
from panpipe.core.plan.offload import HostCopy, StageOffload, Storage


@pytest.mark.parametrize("backward", ["B", "I"])
def test_copy_has_the_positions_of_its_actions_and_the_times_of_its_link(backward):
    words = ("0F0", "0F1", "0F2", f"0{backward}0", f"0{backward}1", f"0{backward}2")
    order = [parse_action(word) for word in words]
    copies = (HostCopy(0, order[1], order[2]), HostCopy(1, order[2], order[3]))
    offload = [StageOffload(0, (Storage("a", 60), Storage("b", 40)), copies)]
    [found] = timed_copies([order], (0,), offload, same_links(1, HostLink(100.0, 50.0)))
    assert found == [TimedCopy(0, 1, 2, 3, 1.0, 2.0, 100), TimedCopy(1, 2, 3, 4, 1.0, 2.0, 100)]


def test_devices_without_offload_have_no_copies():
    orders = [[parse_action("0F0"), parse_action("0B0")], [parse_action("1F0"), parse_action("1B0")]]
    assert timed_copies(orders, (0, 1), [], same_links(2, HostLink(1.0, 1.0))) == [[], []]
