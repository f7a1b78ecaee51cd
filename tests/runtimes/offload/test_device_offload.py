"""Offload of one device: its slots, the copies of a step, and what is warned of."""

import warnings

import pytest
import torch
from attrs import define, field
from panpipe.core.capture.programs.stage_programs import SavedStorage
from panpipe.core.errors import RequestError
from panpipe.runtimes.offload.device_offload import DeviceOffload, slots_of
from panpipe.runtimes.offload.host_memory import HostMemory
from panpipe.runtimes.offload.tier import OffloadTier

from ...support.plans import leaves, orders, plan_of

CPU = torch.device("cpu")
PLAN = plan_of(
    orders("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"),
    (0, 1),
    offload=[leaves(0, 24, "0: 0F1 0F2", "1: 0F2 0B0"), leaves(1, 24, "0: 1F1 1F2")],
)


def storage(size: int, place: int = 0) -> SavedStorage:
    return SavedStorage(f"s{place}", None, size, (place,))


@define
class Run:
    """A stage as far as offload uses it: the saved tensors of its microbatches."""

    values: list[list[object]]
    offloaded: list[SavedStorage]
    index: int = 0
    persistent: set[int] = field(factory=set)

    def saved(self, microbatch: int) -> list[object]:
        return self.values[microbatch]


@pytest.fixture
def memory():
    found = HostMemory(OffloadTier(), CPU, 0)
    yield found
    found.close()


def test_slots_are_as_large_as_the_largest_microbatch():
    small, large = {0: [storage(8), storage(100, 1)]}, {0: [storage(65), storage(16, 1)]}
    found = slots_of(PLAN, 0, [small, large, small])
    assert set(found.offsets) == {(0, 0), (0, 1)}
    # Two storages of 65 and 100 bytes start at multiples of 64; both microbatches are away at once.
    first, second = found.offsets[0, 0], found.offsets[0, 1]
    assert (first[1] - first[0], second[1] - second[0]) == (128, 128)
    assert sorted((first[0], second[0])) == [0, 256]
    assert found.bytes == 512


def test_slots_of_a_device_are_those_of_its_stages():
    found = slots_of(PLAN, 1, [{1: [storage(64)]}] * 3)
    assert (found.offsets, found.bytes) == ({(1, 0): (0,)}, 64)


def test_storages_leave_are_freed_and_return_with_their_values(memory):
    values = [[torch.arange(6.0) + m, "number"] for m in range(3)]
    run = Run(values, [storage(24)])
    bound = DeviceOffload(0, memory).bind(PLAN, [{0: run}] * 3)
    assert memory.bytes == 128
    for m in (0, 1):
        away = bound.out(run, m)
        away.wait()
        assert values[m] == [None, "number"]
        assert away.outward
    for m in (1, 0):
        back = bound.back(run, m)
        back.wait()
        assert torch.equal(values[m][0], torch.arange(6.0) + m)
        assert back.started_ns <= back.ended_ns
        assert not back.outward
    with pytest.raises(KeyError):
        bound.back(run, 0)


def test_arena_grows_for_larger_microbatches_and_stays(memory):
    offload, sizes = DeviceOffload(0, memory), []
    for size in (64, 640, 64):
        offload.bind(PLAN, [{0: Run([], [storage(size)])}] * 3)
        sizes.append(memory.bytes)
    assert sizes == [128, 1280, 1280]


def test_storage_that_is_not_as_captured_stays_with_one_warning(memory):
    values = [[torch.arange(6.0)] for _ in range(3)]
    run = Run(values, [storage(8)])
    offload = DeviceOffload(0, memory)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):  # steps
            bound = offload.bind(PLAN, [{0: run}] * 3)
            for m in (0, 1):
                bound.out(run, m).wait()
                bound.back(run, m).wait()
    assert [own[0].tolist() for own in values] == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]] * 3
    (text,) = [str(one.message) for one in warned]
    assert text.startswith("storage 's0' of stage 0 is not as captured: it has more than 8 bytes")
    assert text.endswith("remove it from memory.offload")


def test_error_of_the_arena_is_raised_before_the_step(memory, monkeypatch):
    def full(size):
        raise RequestError(f"no space for {size} bytes")

    monkeypatch.setattr(memory, "reserve", full)
    with pytest.raises(RequestError, match="no space for 128 bytes"):
        DeviceOffload(0, memory).bind(PLAN, [{0: Run([], [storage(64)])}] * 3)
