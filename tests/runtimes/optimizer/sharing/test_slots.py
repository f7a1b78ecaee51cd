"""Memory that buckets use in turns."""

import torch
from panpipe.runtimes.optimizer.sharing.slots import Slots

CPU = torch.device("cpu")


def slots_of(size):
    slots = Slots()
    slots.grow(size, CPU)
    return slots


def test_two_slots_are_allocated_and_then_reused():
    slots = slots_of(100)
    assert slots.has_free
    first, second = slots.take(), slots.take()
    assert [slot.nbytes for slot in slots.all] == [100, 100]
    assert not slots.has_free
    slots.give_back(first)
    assert slots.has_free
    assert slots.take() is first
    slots.give_back(second)
    assert slots.take() is second


def test_another_slot_is_allocated_if_all_are_in_use():
    slots = slots_of(8)
    assert len({id(slots.take()) for _ in range(3)}) == len(slots.all) == 3


def test_dropped_slot_is_never_taken_again():
    slots = slots_of(8)
    slot = slots.take()
    slots.drop(slot)
    slots.give_back(slot)
    assert slots.take() is not slot
    assert len(slots.all) == 1


def test_larger_slots_replace_smaller_ones():
    slots = slots_of(8)
    slots.give_back(slots.take())
    slots.grow(4, CPU)
    assert len(slots.all) == 1
    slots.grow(16, CPU)
    assert slots.take().nbytes == 16


def test_room_is_made_by_the_earliest_sums_of_all_stages():
    slots = slots_of(8)
    order = []
    first, second = slots.take(), slots.take()

    def finish(name, slot):
        def work():
            order.append(name)
            slots.in_flight.popleft()
            slots.give_back(slot)

        return work

    slots.in_flight += [finish("stage 1", first), finish("stage 0", second)]
    slots.make_room()
    assert order == ["stage 1"]
    assert slots.take() is first
    assert len(slots.all) == 2
