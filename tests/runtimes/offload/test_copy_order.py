"""The order of copies on streams: the five rules that keep a copy from reading or writing memory in use.

1. A copy out waits for what computed the storages.
2. They are freed when compute is ordered after the copy.
3. The new ones are allocated by compute's stream.
4. The copy back waits for its own copy out, and for what used that memory before; its reader waits for it.
5. A slot of the arena is written again only after the copy back has read it.

No GPU is needed: streams record who waits for whom. A stage in which one of the rules is broken is found.
"""

import pytest
import torch
from attrs import evolve
from panpipe.backends import streams
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.offload import device_offload
from panpipe.runtimes.offload.copies import StreamCopies, StreamCopy
from panpipe.runtimes.offload.device_offload import MovedStorages

from ...support.backends.recorded_streams import RecordedStreams
from ...support.cuts import batch_on, captured_once, even_plan
from ...support.models import CASES
from ...support.offloading import all_away
from ...support.parity import PLANS, build

CASE, F64, ROWS, MICROBATCHES = "tied gpt with dropout", torch.float64, 12, 6
CPU = torch.device("cpu")


@pytest.fixture
def recorded(monkeypatch):
    found = RecordedStreams()
    monkeypatch.setitem(streams._KINDS, "cpu", found)
    plain = StreamCopies.__init__

    def divided(self, arena, *others):
        plain(self, arena, *others)
        found.divide(arena)

    monkeypatch.setattr(StreamCopies, "__init__", divided)
    return found


def train(recorded, schedule="1f1b", queues=1):
    operators = captured_once(CASES[CASE], F64, ROWS, MICROBATCHES)
    plan = all_away(even_plan(operators, 2, MICROBATCHES, **PLANS[schedule]), operators, queues=queues)
    with recorded.using(recorded.current(CPU)):
        pipe = build(ThreadTeam(2), CASE, F64, ROWS, plan, MICROBATCHES)
        found = [pipe.step(batch_on(CASES[CASE], ROWS, F64, "cpu")).clone() for _ in range(2)]
        pipe.close()
    return found


SCHEDULES = ("1f1b", "split backward", "interleaved", "zb-v", "gpipe", "gis-h")


@pytest.mark.parametrize(
    ("schedule", "queues"),
    [
        ("zb-v", 2),
        *(pytest.param(name, 2, marks=pytest.mark.slow) for name in SCHEDULES if name != "zb-v"),
        *(pytest.param(name, 1, marks=pytest.mark.slow) for name in SCHEDULES),
    ],
)
def test_every_copy_is_ordered_with_what_reads_and_writes_its_memory(recorded, schedule, queues):
    train(recorded, schedule, queues)
    assert recorded.problems == []
    used = {name[0] for name in recorded.operators if isinstance(name, tuple)}
    assert used == {"compute", "load", "memcpy", "copies", *(["copies back"] if queues == 2 else [])}


def out_of_order(recorded, monkeypatch, owner, name, broken, queues=2):
    monkeypatch.setattr(owner, name, broken)
    train(recorded, "gpipe", queues)
    return "\n".join(recorded.problems)


def test_rule_1_a_copy_out_that_does_not_wait_for_its_producer_is_found(recorded, monkeypatch):
    def early(self, parts):
        stream, given = self._out, self._streams
        with given.using(stream):
            for part in parts:
                self._slot(part).copy_(part.data)
        return StreamCopy(given, self._device, None, given.record(stream))

    assert "reads what is being written on ('compute'" in out_of_order(
        recorded, monkeypatch, StreamCopies, "out", early
    )


def test_rule_2_storages_that_are_freed_while_they_are_copied_are_found(recorded, monkeypatch):
    def early(self):
        if not self.outward:
            self.copy.wait()
            self.moved.restore()
        else:
            self.moved.free()

    found = out_of_order(recorded, monkeypatch, device_offload.MovingCopy, "wait", early)
    assert "is handed memory that is in use on ('copies'" in found


def test_rule_3_storages_that_the_copy_stream_allocates_are_found(recorded, monkeypatch):
    plain = MovedStorages.allocate

    def elsewhere(self):
        with recorded.using(recorded.named(("copies back", 0), CPU)):
            plain(self)

    found = out_of_order(recorded, monkeypatch, MovedStorages, "allocate", elsewhere)
    assert "is handed memory that is in use on ('compute'" in found


def test_rule_4_a_copy_back_that_waits_for_nothing_is_found(recorded, monkeypatch):
    def early(self, parts, own):
        stream, given = self._back, self._streams
        with given.using(stream):
            for part in parts:
                part.data.copy_(self._slot(part))
        return StreamCopy(given, self._device, None, given.record(stream))

    found = out_of_order(recorded, monkeypatch, StreamCopies, "back", early)
    assert "reads what is being written on ('copies'" in found
    assert "writes what is in use on ('compute'" in found


def test_rule_4_a_reader_that_does_not_wait_for_its_copy_back_is_found(recorded, monkeypatch):
    def early(self):
        if self.outward:
            self.copy.wait()
            self.moved.free()
        else:
            self.moved.restore()

    found = out_of_order(recorded, monkeypatch, device_offload.MovingCopy, "wait", early)
    assert "reads what is being written on ('copies back'" in found


def test_rule_5_a_slot_that_is_written_before_its_copy_back_has_read_it_is_found(recorded, monkeypatch):
    """Slots of neighbouring stages' copies are made to overlap, and copies out wait for nothing but their producer."""
    plain = device_offload.slots_of

    def overlapping(plan, device, offloaded):
        found = plain(plan, device, offloaded)
        return evolve(found, offsets={key: tuple(0 for _ in offsets) for key, offsets in found.offsets.items()})

    found = out_of_order(recorded, monkeypatch, device_offload, "slots_of", overlapping)
    assert "writes what is in use on ('copies back'" in found
