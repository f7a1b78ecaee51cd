"""Bytes by storages: views share theirs, and storages report their own end."""

import gc

import torch
from panpipe.core.capture.graph.storages import StorageMeter, WatchEverything, storage_sizes
from panpipe.core.tensor_metadata import state_of, storage_of


def test_views_count_once_with_the_bytes_of_their_base():
    base, other = torch.zeros(10), torch.zeros(3, dtype=torch.float64)
    assert sorted(storage_sizes([base, base[2:4], base.view(2, 5), other, "x", None]).values()) == [24, 40]
    assert storage_of(base[3:]) == storage_of(base) != storage_of(other)
    assert storage_of(torch.eye(2).to_sparse()) is None


def test_state_changes_with_a_write_and_with_other_data():
    tensor = torch.zeros(2)
    first = state_of(tensor)
    assert state_of(tensor) == first
    tensor.add_(1)
    second = state_of(tensor)
    tensor.data = torch.zeros(2)
    assert len({first, second, state_of(tensor)}) == 3


def test_meter_counts_each_storage_until_it_dies():
    told = []
    meter = StorageMeter(told.append)
    first, second, ignored = torch.zeros(4), torch.zeros(2), torch.zeros(100)
    meter.watch([first, first[1:], "x", ignored], storage_sizes([ignored]))
    meter.watch([first, second])
    assert (meter.alive, meter.peak) == (24, 24)
    view = first[1:]
    del first
    gc.collect()
    assert meter.alive == 24  # the view holds it
    del view
    gc.collect()
    assert (meter.alive, meter.peak, told) == (8, 24, [16, 24, 8])
    third = torch.zeros(1)
    meter.watch([third])
    assert (meter.alive, meter.peak) == (12, 24)


def test_every_result_of_a_program_is_watched():
    meter, x = StorageMeter(), torch.zeros(4)
    with WatchEverything(meter, storage_sizes([x])):
        y = (x + 1) * 2
    assert (meter.peak, meter.alive) == (32, 16)
    assert y.tolist() == [2.0] * 4
