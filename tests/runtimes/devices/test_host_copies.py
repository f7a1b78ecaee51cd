"""Copies between a device and the host: both directions, pinned and pageable, the median of each size."""

import pytest
import torch
from panpipe.runtimes.devices import host_copies as module
from panpipe.runtimes.devices.host_copies import host_copies


def test_cpu_has_no_host_copies():
    assert host_copies(torch.device("cpu")) == []


def test_each_kind_has_a_line(monkeypatch):
    monkeypatch.setattr(module, "streams_of", lambda device: object())
    monkeypatch.setattr(
        module, "_copy_s", lambda device, size, to_host, pinned, repeats: (2 + to_host) * size / 1e9 + 1e-6 * pinned
    )
    found = host_copies(torch.device("cuda"), sizes=(1000, 2000, 4000), repeats=3)
    assert [(copy.to_host, copy.pinned) for copy in found] == [
        (False, True), (False, False), (True, True), (True, False)
    ]  # fmt: skip
    assert [copy.line.bytes_per_s for copy in found] == pytest.approx([5e8, 5e8, 1e9 / 3, 1e9 / 3])
    assert [copy.line.latency_s for copy in found] == pytest.approx([1e-6, 0, 1e-6, 0], abs=1e-12)


@pytest.mark.parametrize("to_host", [True, False])
def test_median_of_the_repeats_without_the_first(monkeypatch, to_host):
    copied, durations = [], iter([100.0, 3.0, 1.0, 2.0])

    class Watch:
        def __init__(self, device):
            self.device = device

        def active(self):
            return torch.no_grad()

        def now(self):
            return 0

        def between(self, start, end):
            return next(durations)

    real = torch.Tensor.copy_

    def copy_(target, source, non_blocking):
        copied.append((target.numel(), non_blocking))
        return real(target, source)

    monkeypatch.setattr(module, "Stopwatch", Watch)
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    assert module._copy_s(torch.device("cpu"), 16, to_host, False, 3) == 2.0
    assert copied == [(16, True)] * 4
