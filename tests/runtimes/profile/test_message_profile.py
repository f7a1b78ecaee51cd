"""What messages take of the devices at their ends, with a transport that takes a known time."""

import threading

import pytest
import torch
from panpipe.backends.contract import Backend
from panpipe.core.costs.message_overhead import FREE
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.profile import message_profile
from panpipe.runtimes.profile.message_profile import measured_message_line

LEAST_S, S_PER_BYTE = 4e-3, 2e-8


class Clock(threading.local):
    """Each device's own time."""

    now_s = 0.0


CLOCK = Clock()


class Done:
    def wait(self):
        pass


class Busy(Backend):
    """A message takes its sender a time that is linear in its bytes, and is then there."""

    def __init__(self, device, devices):
        self.device, self.devices = device, devices

    def send(self, tensors, peer):
        CLOCK.now_s += LEAST_S + S_PER_BYTE * sum(t.nbytes for t in tensors)
        return Done()

    def receive(self, buffers, peer):
        return Done()

    def close(self, failure=None):
        pass


def team_of(size):
    team = ThreadTeam(size)
    team.backend = lambda device: Busy(device, size)
    return team


def test_message_cost_is_half_of_a_message_sent_and_one_received(monkeypatch):
    monkeypatch.setattr(message_profile, "ROUNDS", 3)
    monkeypatch.setattr(message_profile, "_work", lambda *_: None)
    monkeypatch.setattr(message_profile, "finished_s", lambda _: CLOCK.now_s)
    line = measured_message_line(team_of(3), dict.fromkeys(range(3), torch.device("cpu")))  # the third has no partner
    assert line.least_s == pytest.approx(LEAST_S / 2, rel=1e-6)
    assert line.s_per_byte == pytest.approx(S_PER_BYTE / 2, rel=1e-6)


@pytest.mark.parametrize(("size", "device"), [(1, "cpu"), (2, "cuda")])
def test_message_cost_is_zero_for_one_device_and_for_gpus(size, device):
    assert measured_message_line(team_of(size), dict.fromkeys(range(size), torch.device(device))) == FREE


def test_threads_measure_one_message_line():
    line = measured_message_line(ThreadTeam(2), dict.fromkeys(range(2), torch.device("cpu")))
    assert line.least_s >= 0
    assert line.s_per_byte >= 0


def test_work_during_messages_takes_about_three_milliseconds_on_any_machine(monkeypatch):
    def work(_, products):
        CLOCK.now_s += 1e-3 * products

    monkeypatch.setattr(message_profile, "_work", work)
    monkeypatch.setattr(message_profile, "finished_s", lambda _: CLOCK.now_s)
    assert message_profile._products(torch.ones(2, 2)) in (3, 4)
