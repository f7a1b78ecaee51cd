"""Copies between devices and hosts by hand: rates per direction, shared links, waits, memory of hosts."""

import pytest
from attrs import evolve
from panpipe.answers.step_tables import idle_of
from panpipe.core.cluster.cluster import Cluster, Device, Hub
from panpipe.core.cluster.routing import Link
from panpipe.core.costs.costs import StageCosts
from panpipe.core.errors import RequestError
from panpipe.core.timing.idle import HOST_COPIES, SHARED_LINKS
from panpipe.core.trace.perfetto import write_trace
from panpipe.core.trace.perfetto_reader import read_trace
from panpipe.core.trace.trace import HOST_MEMORY
from panpipe.core.validation.validate import validate
from panpipe.simulators.bubbles import HOST_COPY
from panpipe.simulators.run import simulate

from ..support.plans import leaves, orders, plan_of

COST = StageCosts(1.0, 1.0, 1.0, saved_bytes=300)
ORDER = orders("0F0 0F1 0F2 0B0 0B1 0B2")
OFFLOAD = (leaves(0, 200, "1: 0F2 0F2", "2: 0B0 0B0"),)


def one_device(*rates, queues=1):
    """A device whose link to the host has these rates: out, back, both together."""
    out, *others = rates
    links = (Link("gpu0", "host0", out, 0.0, *others),)
    cluster = Cluster((Device("gpu0", 10**6),), (Hub("host0", "host"),), links)
    plan = plan_of(ORDER, (0,), costs=[COST], cluster=cluster, offload=OFFLOAD)
    return evolve(plan, memory=evolve(plan.memory, host_copy_queues=queues))


def spans(result):
    return {str(e.action): (e.start_s, e.end_s) for e in result.trace.events if "LOAD" in e.action.kind}


def test_directions_that_share_a_rate_slow_each_other():
    """RELOAD1 and OFFLOAD2 start together: alone 2 s each at 100 bytes/s, together 50 bytes/s each."""
    alone = spans(simulate(one_device(100.0, None, queues=2)))
    assert (alone["0RELOAD1"], alone["0OFFLOAD2"]) == ((5.0, 7.0), (5.0, 7.0))
    result = simulate(one_device(100.0, None, 100.0, queues=2))
    assert (spans(result)["0RELOAD1"], spans(result)["0OFFLOAD2"]) == ((5.0, 9.0), (5.0, 9.0))
    assert spans(simulate(one_device(100.0, None, 60.0)))["0OFFLOAD1"] == pytest.approx((2.0, 2.0 + 200 / 60))


def test_wait_for_a_copy_is_a_cause_of_its_own():
    """2–4 for OFFLOAD1, 5–9 for OFFLOAD2 after RELOAD1 in the same queue."""
    result = simulate(one_device(100.0))
    assert {cause: s for cause, s in result.bubbles[0].items() if s} == {HOST_COPY: 6.0}


def two_devices(*uplinks, memory_bytes_per_s=None):
    """Two devices on one PCIe switch, or each with its own, under one host; each offloads a microbatch at once."""
    devices = (Device("gpu0", 10**6), Device("gpu1", 10**6))
    switches = sorted(set(uplinks))
    links = [Link(device.name, switch, 100.0, 0.0) for device, switch in zip(devices, uplinks, strict=True)]
    links += [Link(switch, "host", 100.0, 0.0) for switch in switches]
    links.append(Link("gpu0", "gpu1", 1e9, 0.0))
    hubs = (*(Hub(switch, "pcie") for switch in switches), Hub("host", "host", None, memory_bytes_per_s))
    rows = orders("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1")
    offload = [leaves(0, 200, "0: 0F1 0F1"), leaves(1, 200, "0: 1F1 1F1")]
    return plan_of(
        rows, (0, 1), costs=[COST] * 2, cluster=Cluster(devices, hubs, tuple(links)), edges=[], offload=offload
    )


def test_neighbours_on_one_pcie_switch_share_its_link_to_the_host():
    apart, shared = simulate(two_devices("pcie0", "pcie1")), simulate(two_devices("pcie0", "pcie0"))
    assert [use.bytes_per_s for use in apart.host_copies] == [100.0] * 4
    assert [use.bytes_per_s for use in shared.host_copies] == [50.0] * 4
    assert [(use.device, use.direction, use.count) for use in shared.host_copies] == [
        (0, "from host", 1), (0, "to host", 1), (1, "from host", 1), (1, "to host", 1)
    ]  # fmt: skip
    assert shared.bubbles[0][HOST_COPY] == apart.bubbles[0][HOST_COPY] + 2.0 + 2.0


def test_devices_of_a_host_share_the_rate_of_its_memory():
    """Both write 200 bytes at once, then both read them: at 60 bytes/s each of 120, or at the 100 of their links."""
    slow, fast = (simulate(two_devices("pcie0", "pcie1", memory_bytes_per_s=rate)) for rate in (120.0, 400.0))
    assert [use.bytes_per_s for use in slow.host_copies] == pytest.approx([60.0] * 4)
    assert [use.bytes_per_s for use in fast.host_copies] == [100.0] * 4
    (written, read) = [use for use in slow.links if "memory of host" in (use.src, use.dst)]
    assert (written.src, written.bytes, read.dst, read.bytes) == ("host", 400.0, "host", 400.0)
    assert written.delay_s + read.delay_s == pytest.approx(4 * (200 / 60 - 2))


def test_a_message_through_the_host_is_written_and_read_in_its_memory():
    """200 bytes over links of 100 bytes/s: the memory's 120 are 60 for a message, and 40 next to a copy out of 100."""
    plan = two_devices("pcie0", "pcie1", memory_bytes_per_s=120.0)
    cluster = evolve(plan.prediction.cluster, links=plan.prediction.cluster.links[:-1])
    assert cluster.transfer_s(0, 1, 200) == pytest.approx(200 / 60)
    edges = (evolve(plan_of(plan.device_actions, (0, 1)).edges[0], bytes=200, gradient_bytes=0),)
    plan = evolve(
        plan, edges=edges, prediction=evolve(plan.prediction, cluster=cluster),
        memory=evolve(plan.memory, offload=plan.memory.offload[:1]),
    )  # fmt: skip
    result = simulate(plan)
    (message,) = [e for e in result.trace.events if str(e.action) == "0SEND_F0>1"]
    assert spans(result)["0OFFLOAD0"] == (1.0, pytest.approx(6.0))  # max-min fair: each crossing of the memory gets 40
    assert (message.start_s, message.end_s) == (1.0, pytest.approx(6.0))


def test_messages_through_the_host_share_its_links_with_copies():
    """1F0's input crosses the links of device 0 while it offloads: 200 and 200 bytes at 100 bytes/s."""
    plan = two_devices("pcie0", "pcie1")
    cluster = evolve(plan.prediction.cluster, links=plan.prediction.cluster.links[:-1])
    edges = plan_of(plan.device_actions, (0, 1)).edges
    plan = evolve(
        plan, edges=(evolve(edges[0], bytes=200, gradient_bytes=0),),
        prediction=evolve(plan.prediction, cluster=cluster),
        memory=evolve(plan.memory, offload=plan.memory.offload[:1]),
    )  # fmt: skip
    validate(plan)
    result = simulate(plan)
    assert spans(result)["0OFFLOAD0"] == (1.0, 5.0)
    messages = [e for e in result.trace.events if str(e.action) == "0SEND_F0>1"]
    assert (messages[0].start_s, messages[0].end_s) == (1.0, 5.0)


def test_trace_has_the_copies_and_the_host_memory(tmp_path):
    trace = simulate(one_device(100.0)).trace
    write_trace(trace, tmp_path / "trace.json")
    assert read_trace(tmp_path / "trace.json") == trace
    samples = [(s.time_s, s.bytes) for s in trace.memory if s.kind == HOST_MEMORY]
    assert samples == [(0.0, 0.0), (2.0, 200.0), (5.0, 400.0), (11.0, 200.0), (13.0, 0.0)]
    assert {e.queue for e in trace.events} == {"compute", "host copies"}
    assert not [s for s in simulate(plan_of(ORDER, (0,))).trace.memory if s.kind == HOST_MEMORY]


def test_why_not_faster_names_host_copies_and_the_links_they_share():
    def causes(plan):
        found = idle_of(simulate(plan))
        return {cause: seconds for cause, seconds in found.causes.items() if seconds}

    assert causes(one_device(100.0)) == {HOST_COPIES: 6.0}
    assert causes(two_devices("pcie0", "pcie1")) == {HOST_COPIES: 4.0}
    assert causes(two_devices("pcie0", "pcie0")) == {HOST_COPIES: 4.0, SHARED_LINKS: 4.0}


@pytest.mark.parametrize("rates", [(100.0, 0.0), (100.0, None, -1.0)])
def test_bad_rates_are_refused(rates):
    with pytest.raises(RequestError, match="a rate must be above 0"):
        one_device(*rates)
