"""What gloo's handles keep."""

import gc
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from panpipe.backends.gloo import _Sent, _Sum, lost

from ..support.launch import results


class Work:
    """Keeps its tensor, as gloo's does."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def wait(self) -> None:
        pass


def test_gloo_handle_frees_its_tensors_after_wait():
    """A trace keeps handles for the times of their transfers; saved tensors must not live on in them."""
    tensor = torch.zeros(4)
    alive = weakref.ref(tensor)
    handle = _Sent([Work(tensor)], 1)
    del tensor
    assert alive() is not None
    handle.wait()
    gc.collect()
    assert alive() is None
    handle.wait()


def test_watched_all_reduce_reports_its_end_without_a_wait():
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as ends:
        groups = list(ends.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30)), range(2)))
    tensors = [torch.full((3,), float(rank + 1)) for rank in range(2)]
    issued = time.perf_counter_ns()
    pairs = zip(groups, tensors, strict=True)
    sums = [_Sum(None, group.allreduce([tensor]), tensor, tensor) for group, tensor in pairs]
    sums[0].watch()
    while sums[0].ended_ns is None:  # nobody waits; the test's own limit ends what never comes
        time.sleep(0.001)
    told, now = sums[0].ended_ns, time.perf_counter_ns()
    for each in sums:
        each.wait()
    assert issued < told <= now
    assert sums[0].ended_ns == told
    assert sums[1].ended_ns is None  # which nobody watched
    assert all(tensor.tolist() == [3.0] * 3 for tensor in tensors)


@pytest.mark.parametrize(("raw", "words"), [
    ("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:28137",
     "its connection closed"),
    ("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection reset by peer", "its connection closed"),
    ("[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to "
     "complete", "no answer came in time"),
    ("[../third_party/gloo/gloo/x.cc:1] out of   buffers", "out of buffers"),
    ("an error\nof another kind", "an error of another kind"),
])  # fmt: skip
def test_gloo_errors_are_translated(raw, words):
    assert lost(RuntimeError(raw)) == words


@pytest.mark.slow
def test_gloo_uses_groups_of_its_own_and_never_the_given_one(tmp_path):
    """With clipping, whose norms are summed over all stages. The given group may use NCCL for tensors of GPUs."""
    first, second = results("foreign_group", tmp_path)
    assert first == second
    assert first["norm"] > 0
