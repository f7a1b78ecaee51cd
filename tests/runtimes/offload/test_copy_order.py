"""The order of copies on streams: the five rules that keep a copy from reading or writing memory in use.

1. A copy out waits for what computed the storages.
2. They are freed when compute is ordered after the copy.
3. The new ones are allocated by compute's stream.
4. The copy back waits for its own copy out, and for what used that memory before; its reader waits for it.
5. A slot of the arena is written again only after the copy back has read it.

No GPU is needed: streams record who waits for whom.
"""

import pytest
import torch
from panpipe.backends import streams
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.offload.copies import StreamCopies

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
