"""The host of the store waits for the ranks that have not read the reason."""

import time

import torch.distributed as dist
from panpipe.runtimes.watch import lost_ranks, reason_read
from panpipe.runtimes.watch.reason_read import acknowledge, linger


def test_host_of_the_store_lingers_until_others_have_read_the_reason_or_are_silent(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(reason_read, "LINGER_S", 20.0)
    monkeypatch.setattr(lost_ranks, "_SILENCE_S", 30.0)
    acknowledge(store, 1)
    start = time.monotonic()
    linger(store, [1])
    at_once = time.monotonic() - start
    monkeypatch.setattr(lost_ranks, "_SILENCE_S", 0.5)
    start = time.monotonic()
    linger(store, [1, 2])
    silent = time.monotonic() - start
    assert at_once < 10
    assert 0.5 <= silent < 15
