"""When freed memory is returned to the kernel."""

import pytest
import torch
from panpipe.runtimes.devices import heap


def test_bytes_in_use_count_a_tensor_until_it_is_freed():
    before = heap.bytes_in_use()
    if before is None:
        pytest.skip("this C library does not count them")
    tensor = torch.ones(64 << 20)
    with_tensor = heap.bytes_in_use()
    del tensor
    other = 32 << 20  # other threads of the process, and the collection of garbage, allocate and free meanwhile
    assert abs(with_tensor - before - (256 << 20)) < other
    assert abs(heap.bytes_in_use() - before) < other


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
