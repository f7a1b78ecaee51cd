"""Storages that a stage holds: numbered in a capture, and replaced by stand-ins without memory in a replay."""

import torch
from panpipe.core.capture.graph.storages import StorageMeter
from panpipe.runtimes.programs.graphs.held_storages import HeldStorages, WatchedStorages


def test_storages_have_one_number_while_they_live():
    storages = HeldStorages()
    one, two = torch.zeros(4), torch.zeros(8)
    parameter = torch.zeros(16)
    ignored = {parameter.untyped_storage()._cdata}
    assert storages.note([one, one[1:], 3, parameter], ignored) == ((0, 16),)
    assert storages.note([two, one], ignored) == ((1, 32), (0, 16))
    del one
    assert storages.note([torch.zeros(4)], ignored) == ((2, 16),)


def test_stand_ins_are_shared_and_die_with_their_last_holder():
    storages = HeldStorages()
    first, second = WatchedStorages(storages), WatchedStorages(storages)
    meter = StorageMeter()
    first.after(0, ((0, 100), (1, 10)))
    meter.watch(first.held(0))
    second.after(0, ((1, 10),))
    meter.watch(second.held(0))
    assert meter.alive == 110
    first.after(0, ())
    assert meter.alive == 10
    second.after(0, ())
    assert meter.alive == 0
    assert first.held(1) == []
