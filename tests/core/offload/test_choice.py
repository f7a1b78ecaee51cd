"""What a user asks to offload, and which storages leave: as little as the limit needs, as much as the link carries."""

import pytest
from panpipe.core.costs.costs import StageCosts
from panpipe.core.errors import RequestError
from panpipe.core.offload.choice import Offloadable, choose_offload, everything, within
from panpipe.core.offload.host_links import HostLink, same_links, timed_copies
from panpipe.core.offload.request import check_offload_request, parse_offload
from panpipe.core.plan.memory_policy import Storage
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import find_family
from panpipe.core.timing.orders import evaluate, latest_times

# Which storages leave: longest stay first, as little as the limit needs, as much as the link carries.


PARTS = tuple(Storage(f"part{number}", 10 - number) for number in range(5))  # 40 bytes


def task(name="interleaved-1f1b", devices=4, count=8, chunks=2, k=1.0, links=None, storages=PARTS, **more):
    schedule = find_family(name).build(ScheduleProblem(devices, count, chunks))
    size = sum(storage.bytes for storage in storages)
    costs = [StageCosts(1, 1, 1, saved_bytes=size)] * (devices * chunks)
    rate = 2 * size / (3 * k)
    links = links or same_links(devices, HostLink(rate, rate))
    times = latest_times(schedule.device_actions, schedule.placement, costs)
    return schedule, Offloadable(schedule.device_actions, times, costs, [storages] * len(costs), links, **more)


def run(schedule, given, offload):
    copies = timed_copies(schedule.device_actions, schedule.placement, offload, given.links)
    return evaluate(
        schedule.device_actions, schedule.placement, given.costs, copies=copies, host_queues=given.queues
    )  # fmt: skip


@pytest.mark.parametrize("share", [0.8, 0.5, 0.4])
@pytest.mark.parametrize("queues", [1, 2])
def test_devices_keep_their_limits_and_the_step_its_time(share, queues):
    schedule, given = task(k=0.7, queues=queues)
    before = run(schedule, given, ())
    limits = [share * max(before.peak_memory)] * 4
    found = run(schedule, given, choose_offload(given, within(limits)))
    assert max(found.peak_memory) <= limits[0]
    assert found.makespan <= before.makespan * 1.005


def test_less_memory_takes_more_bytes():
    schedule, given = task(k=0.3)
    peak = max(run(schedule, given, ()).peak_memory)
    moved = [
        sum(each.bytes * len(each.copies) for each in choose_offload(given, within([share * peak] * 4)))
        for share in (0.9, 0.7, 0.5, 0.35)
    ]
    assert moved == sorted(moved)
    assert moved[0] < moved[-1]


@pytest.mark.parametrize("k", [0.2, 1.0, 1.5, 2.0, 3.0, 4.0, 20.0])
def test_everything_that_the_link_carries_leaves_and_costs_at_most_two_percent(k):
    schedule, given = task("po-f", devices=4, count=16, k=k)
    before = run(schedule, given, ())
    found = run(schedule, given, choose_offload(given, everything))
    assert found.makespan <= 1.02 * before.makespan
    assert max(found.peak_memory) <= max(before.peak_memory)
    if k <= 4:
        assert max(found.peak_memory) < 0.9 * max(before.peak_memory)


# What a user asks to offload.


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("some", "offload is 'some': give none, all, auto, or the share of each stage, such as 0:1,2:0.5"),
        ("0:1,0:0.5", "offload gives stage 0 twice"),
        ("0:1.5", r"offload of stage 0 is 1.5: give a share from 0 to 1"),
        ("0:nan", r"offload of stage 0 is nan: give a share from 0 to 1"),
        ("-1:1", "offload names stage -1: stages are numbered from 0"),
        ("0", "give none, all, auto"),
        ("", "give none, all, auto"),
    ],
)
def test_wrong_texts_are_refused(text, message):
    with pytest.raises(RequestError, match=message):
        parse_offload(text)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("half", "offload is 'half'"),
        (0.5, "offload is 0.5"),
        ({4: 1.0}, "offload names stage 4, and the plan has stages 0 to 3: name those"),
        ({"0": 1.0}, "offload names stage '0': stages are numbered from 0"),
        ({0: True}, "offload of stage 0 is True"),
        ({0: "1"}, "offload of stage 0 is '1'"),
    ],
)
def test_wrong_values_are_refused(wanted, message):
    with pytest.raises(RequestError, match=message):
        check_offload_request(wanted, stages=4)
