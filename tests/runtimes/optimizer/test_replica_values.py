"""What replicas exchange, over the transport of one process: rows, totals, and the first one's tensors."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from panpipe.backends.memcpy import connect
from panpipe.runtimes.devices.compute import HostQueue
from panpipe.runtimes.optimizer.replica_values import broadcast_from_first, gathered, sum_over_replicas, sum_rows


def on_each(replicas, work):
    ends = connect(replicas)
    with ThreadPoolExecutor(replicas) as pool:
        return list(pool.map(work, ends))


def test_rows_of_all_replicas_are_in_their_order_whatever_their_number():
    rows = [torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0]])]
    found = on_each(2, lambda end: gathered(sum_rows(rows[end.device], end, 3)))
    assert found == [([[[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]]], None)] * 2


@pytest.mark.parametrize(("marked", "first"), [([], None), ([2], 2), ([1, 2], 1)])
def test_first_replica_that_is_marked_is_known_to_all(marked, first):
    found = on_each(3, lambda end: gathered(sum_rows(torch.tensor([[0.5]]), end, 1, end.device in marked)))
    assert found == [([[[0.5]]] * 3, first)] * 3


def test_totals_are_summed_in_float64():
    numbers = [[torch.tensor(2.0**24), 1.0], [torch.tensor(1.0), 0.5]]
    found = on_each(2, lambda end: sum_over_replicas(numbers[end.device], end, HostQueue()))
    assert [(total.dtype, total.tolist()) for total in found] == [(torch.float64, [2.0**24 + 1, 1.5])] * 2


def test_all_replicas_take_the_tensors_of_the_first_over():
    def tensors(device):
        return [torch.full((2, 3), float(device)).t(), torch.tensor(device)]

    held = [tensors(device) for device in range(3)]
    storages = [tensor.data_ptr() for own in held for tensor in own]
    on_each(3, lambda end: broadcast_from_first(held[end.device], end))
    assert all(value.sum() == 0 for own in held for value in own)
    assert [tensor.data_ptr() for own in held for tensor in own] == storages  # written in place
    on_each(2, lambda end: broadcast_from_first([], end))
