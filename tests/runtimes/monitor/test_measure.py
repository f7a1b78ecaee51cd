"""The numbers of a device by hand: busy time, messages, rows and tokens, over all devices, and the memory of a CPU."""

import math
from types import SimpleNamespace

import pytest
import torch
from panpipe.core.actions import parse_action
from panpipe.core.trace.trace import COMPUTE_QUEUE, Trace, TraceEvent
from panpipe.runtimes.devices.compute import HostQueue
from panpipe.runtimes.engine.step_data import StepRecord
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.monitor.measure import MemoryPeak, Numbers, gather_numbers, numbers_of, tokens_of
from panpipe.runtimes.optimizer.stage_state import StageState
from torch import nn

SECOND = 10**9


def pieces(*rows):
    return [
        SimpleNamespace(
            names=("batch['input_ids']", "batch['y']"), leaves=(torch.zeros(n, 5), torch.zeros(n)), samples=n
        )
        for n in rows
    ]


def test_tokens_are_the_elements_of_input_ids():
    pieces = [
        SimpleNamespace(names=("batch['input_ids']", "batch['y']"), leaves=(torch.zeros(rows, 5), torch.zeros(rows)))
        for rows in (2, 1)
    ]
    assert tokens_of(pieces) == 15
    assert math.isnan(tokens_of([SimpleNamespace(names=("batch['x']",), leaves=(torch.zeros(2, 5),))]))


def test_device_is_busy_in_its_programs_and_counts_what_it_sends():
    events = [
        (parse_action("0F0"), COMPUTE_QUEUE, 0, 2 * SECOND, 0),
        (parse_action("0SEND_F0>1"), "send to 1", 2 * SECOND, 3 * SECOND, 64),
        (parse_action("0RECV_B0<1"), "receive from 1", 2 * SECOND, 5 * SECOND, 32),
        (parse_action("0B0"), COMPUTE_QUEUE, 5 * SECOND, 8 * SECOND, 0),
        (parse_action("0STEP"), COMPUTE_QUEUE, 8 * SECOND, 9 * SECOND, 0),
    ]
    record = StepRecord({}, start_ns=SECOND, end_ns=11 * SECOND, events=events, peak_saved=70)
    found = numbers_of(0, record, pieces(2, 1), 12.5, 1000, None)
    assert found == Numbers(
        busy_s=5.0, step_s=10.0, call_s=12.5, memory_peak=1000, saved_peak=70, messages=1, message_bytes=64, rows=3,
        tokens=15,
    )  # fmt: skip


def test_simulated_device_has_the_times_of_the_clock():
    event = TraceEvent(1, COMPUTE_QUEUE, parse_action("1F0"), 1.0, 3.5)
    other = TraceEvent(0, COMPUTE_QUEUE, parse_action("0F0"), 0.0, 1.0)
    found = numbers_of(1, StepRecord({}), pieces(2), 99.0, 7, Trace("simulated", "", 2, (other, event), (), 4.0))
    assert (found.busy_s, found.step_s, found.call_s) == (2.5, 4.0, 4.0)


def test_numbers_of_all_devices_are_in_their_order():
    team, rows = ThreadTeam(2), {device: Numbers(*map(float, range(device, device + 9))) for device in (1, 0)}
    assert gather_numbers(team, {}, rows) == [rows[0], rows[1]]


def test_numbers_of_several_ranks_are_summed_into_one_table():
    team = ThreadTeam(2)
    own = Numbers(*[1.5] * 9)
    ranks = SimpleNamespace(
        local=(1,), mesh=team.mesh, replica=0, size=2, total=lambda device, table: table + torch.eye(2, 9).double(),
        run_local=lambda work: {1: work(1)},
    )  # fmt: skip
    first, second = gather_numbers(ranks, {1: HostQueue()}, {1: own})
    assert first == Numbers(1.0, *[0.0] * 8)
    assert second == Numbers(1.5, 2.5, *[1.5] * 7)


def test_memory_of_a_cpu_counts_each_storage_once():
    weight = nn.Parameter(torch.zeros(4))
    buffer = torch.zeros(2)
    state = StageState({"w": weight}, {"b": buffer, "view": buffer[:1]}, lambda named: torch.optim.SGD(named, lr=1.0))
    peak = MemoryPeak([state])
    assert peak.bytes(100) == 16 + 8 + 100
    state.gradient_buffer(weight)  # allocated in the first step
    assert peak.bytes(0) == 16 + 8 + 16


@pytest.mark.parametrize("name", ["batch['input_ids']", "batch['a']['input_ids']"])
def test_tokens_are_found_in_any_nesting(name):
    assert tokens_of([SimpleNamespace(names=(name,), leaves=(torch.zeros(2, 3),))]) == 6
