"""What gloo's handles keep, plain data over a process group, and the hardware queues of a GPU."""

import gc
import json
import os
import subprocess
import sys
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from panpipe.backends.gloo import _Sent, _Sum, lost
from panpipe.backends.nccl import VARIABLE, warn_of_few_connections

from ..support.launch import results

# What gloo's handles keep.


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


# The number of hardware queues of a GPU: requested when the package is imported, before CUDA is initialized.


SCRIPT = """
import json, os, sys, types, warnings
if sys.argv[1] != "no torch":
    cuda = types.SimpleNamespace(is_initialized=lambda: sys.argv[1] == "initialized")
    sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import panpipe
print(json.dumps([os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"), [str(each.message) for each in said]]))
"""


@pytest.mark.parametrize(
    ("state", "given", "found", "warned"),
    [
        ("no torch", None, "32", False),
        ("imported", None, "32", False),
        ("initialized", None, None, True),
        ("initialized", "16", "16", False),
        ("no torch", "1", "1", False),
    ],
)
def test_importing_the_package_requests_all_queues_unless_it_is_too_late(state, given, found, warned):
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environment |= {} if given is None else {VARIABLE: given}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, state], env=environment, capture_output=True, text=True, check=True
    )
    value, said = json.loads(done.stdout)
    assert value == found
    assert len(said) == warned
    assert all("import panpipe first, or set CUDA_DEVICE_MAX_CONNECTIONS=32" in text for text in said)


@pytest.mark.parametrize(("given", "warned"), [("1", True), (None, True), ("16", False), ("32", False)])
def test_nccl_warns_once_of_few_queues(given, warned, monkeypatch):
    warn_of_few_connections.cache_clear()
    monkeypatch.delenv(VARIABLE, raising=False)
    if given is not None:
        monkeypatch.setenv(VARIABLE, given)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            warn_of_few_connections()
    assert len(said) == warned
    warn_of_few_connections.cache_clear()
