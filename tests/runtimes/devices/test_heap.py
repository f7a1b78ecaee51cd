"""When freed memory is returned to the kernel."""

import pytest
import torch
from panpipe.runtimes.devices import heap


def test_bytes_in_use_count_a_tensor_until_it_is_freed():
    before = heap.bytes_in_use()
    if before is None:
        pytest.skip("this C library does not count them")
    tensor = torch.ones(4 << 20)
    with_tensor = heap.bytes_in_use()
    del tensor
    # Not exactly 16 MiB: other threads of the process, and the collection of garbage, allocate and free meanwhile.
    assert abs(with_tensor - before - (16 << 20)) < 1 << 20
    assert heap.bytes_in_use() - before < 1 << 20


@pytest.mark.parametrize(
    ("used", "returned"),
    [
        ([10, 20, 15, 20, 21, 5], [True, True, False, False, True, False]),
        ([None, None], [True, True]),
    ],
)
def test_free_pages_are_returned_while_more_memory_is_in_use_than_before(monkeypatch, used, returned):
    calls, answers = [], iter(used)
    monkeypatch.setattr(heap, "bytes_in_use", lambda: next(answers))
    monkeypatch.setattr(heap, "give_back_freed_memory", lambda: calls.append(True))
    growing, seen = heap.GrowingHeap(), []
    for _ in used:
        before = len(calls)
        growing.give_back()
        seen.append(len(calls) > before)
    assert seen == returned
