"""The meeting of a rank: its address, the store that it joins, what it reports, and how it leaves."""

import threading

import pytest
import torch.distributed as dist
from panpipe.core.errors import RequestError, WorkerError
from panpipe.runtimes.launch.meeting import meet, store_address


@pytest.mark.parametrize(("address", "port"), [("", "29500"), ("127.0.0.1", ""), ("127.0.0.1", "high")])
def test_rank_without_a_rendezvous_address_is_refused(monkeypatch, address, port):
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(RequestError, match="start the script with torchrun"):
        store_address(1, 2)


def test_missing_ranks_are_named_on_all_ranks_that_arrived():
    store, named = dist.HashStore(), {}

    def come(rank):
        try:
            meet(store, rank, 4, 0.3)
        except WorkerError as error:
            named[rank] = str(error)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (1, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert named[1] == named[3]
    assert named[1].startswith("ranks 0, 2 of 4 did not arrive within 0.3 s: ")
