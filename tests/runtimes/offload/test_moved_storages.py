"""Storages of a microbatch that leave their device: taken, freed, and put back as the views that they were."""

import torch
from panpipe.core.capture.programs.stage_programs import SavedStorage
from panpipe.core.tensor_metadata import storage_of
from panpipe.runtimes.offload.moved_storages import MovedStorages


def planned(*each):
    """Storages of (places, bytes)."""
    return [SavedStorage(f"s{number}", None, size, places) for number, (places, size) in enumerate(each)]


def test_views_of_one_storage_leave_and_return_together():
    a, b = torch.arange(6.0).reshape(2, 3), torch.ones(2)
    saved = [a, a.t(), b, 7]
    moved = MovedStorages.take(saved, planned(((0, 1), 24)), set())
    assert (moved.sizes, list(moved.taken), list(moved.staying)) == ([24], [0], [])
    [host] = [each.clone() for each in moved.data]
    moved.free()
    assert saved == [None, None, b, 7]
    assert moved.data == []
    moved.allocate()
    moved.data[0].copy_(host)
    moved.restore()
    assert saved[0].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert saved[1].tolist() == saved[0].t().tolist()
    assert storage_of(saved[0]) == storage_of(saved[1]) != storage_of(a)


def test_conjugate_and_negative_views_keep_their_bits():
    z = torch.tensor([1 + 2j])
    saved = [z.conj(), z.conj().imag]
    moved = MovedStorages.take(saved, planned(((0, 1), 8)), set())
    host = moved.data[0].clone()
    moved.free()
    moved.allocate()
    moved.data[0].copy_(host)
    moved.restore()
    assert saved[0].is_conj()
    assert saved[1].is_neg()
    assert (saved[0].tolist(), saved[1].tolist()) == ([1 - 2j], [-2.0])


def test_storage_that_is_not_as_captured_stays_on_the_device():
    a, b, parameter = torch.ones(4), torch.ones(4), torch.ones(4)
    saved = [a, b, parameter, None]
    wanted = planned(((0,), 8), ((0, 1), 32), ((2,), 16), ((3,), 16), ((1,), 16))
    moved = MovedStorages.take(saved, wanted, {storage_of(parameter)})
    assert list(moved.taken) == [4]
    assert list(moved.staying) == [0, 1, 2, 3]


def test_two_planned_storages_that_share_memory_leave_once():
    a = torch.ones(4)
    moved = MovedStorages.take([a, a[:2]], planned(((0,), 16), ((1,), 16)), set())
    assert (list(moved.taken), list(moved.staying), moved.sizes) == ([0], [], [16])
