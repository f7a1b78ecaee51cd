"""The answer if no plan fits: what does not fit, and each change in words and as data."""

from types import SimpleNamespace

import pytest
from attrs import evolve
from panpipe.answers.plan import infeasible as module
from panpipe.answers.plan.infeasible import InfeasibleAnswer, refuse
from panpipe.core.actions import parse_action
from panpipe.core.costs.graph import OpNode
from panpipe.core.errors import InfeasibleError
from panpipe.core.plan.plan import MemoryPolicy
from panpipe.core.search.suggestions.changes import (
    MORE_DEVICES,
    MORE_MEMORY,
    OFFLOAD,
    RECOMPUTE,
    SHARD,
    SMALLER_MICROBATCHES,
    Change,
)
from panpipe.core.search.suggestions.infeasible import Holding

from ...support.plans import predicted, scheduled

PLAN = predicted(scheduled("1f1b", 2, 4), step_s=3.0)
RECOMPUTES = evolve(PLAN, memory=MemoryPolicy((0, 1)))


def answer(*changes, large=None, tensor=1, plan=PLAN):
    """An answer with these facts, without a search."""
    found = object.__new__(InfeasibleAnswer)
    held = Holding(1, parse_action("1F2"), {"saved": 300.0, "workspace": 0.0, "parameters": 50.0}, 200.0)
    vars(found).update(
        microbatches=4, devices=2, tensor=tensor, plan=plan, limits=(200.0, 200.0), held=held, saves=True, large=large,
        changes=changes,
    )  # fmt: skip
    return found


WORDS = {
    MORE_DEVICES: (Change(MORE_DEVICES, 4, PLAN), "4 devices in place of 2, step at most 3 s", "devices", 4),
    SMALLER_MICROBATCHES: (
        Change(SMALLER_MICROBATCHES, 8, PLAN), "8 microbatches in place of 4, each 1/2 the size, step at most 3 s",
        "microbatches", 8,
    ),
    RECOMPUTE: (
        Change(RECOMPUTE, 2, RECOMPUTES), "stages 0 1 of the closest plan, step at most 3 s", "stages", [0, 1]),
    SHARD: (
        Change(SHARD, 2, evolve(PLAN, shard=("optimizer",) * 2)),
        "--shard optimizer: 2 replicas share the optimizer's state, with mesh pp=2,dp=2, step", "replicas", 2,
    ),
    f"{SHARD} gradients": (
        Change(SHARD, 2, evolve(PLAN, shard=("gradients",) * 2)),
        "--shard gradients: 2 replicas share gradients and the optimizer's state, with mesh pp=2,dp=2", "replicas", 2,
    ),
    OFFLOAD: (Change(OFFLOAD, 64, PLAN), "--offload auto: 64 B a step to the host and back, step at most", "bytes", 64),
    MORE_MEMORY: (Change(MORE_MEMORY, 150, PLAN), "150 B more for each device, step at most 3 s", "bytes", 150),
}  # fmt: skip


@pytest.mark.parametrize(("change", "words", "unit", "value"), WORDS.values(), ids=WORDS)
def test_change_in_words_and_as_data(change, words, unit, value):
    found = answer(change)
    assert f"smallest change that fits: {words}" in found.text()
    assert found.plain()["changes"] == [
        {"change": change.what, unit: value, "step_s": 3.0, "schedule": change.found.schedule}
    ]


def test_devices_of_tensor_ranks_are_counted_one_by_one():
    found = answer(WORDS[MORE_DEVICES][0], tensor=4)
    assert "16 devices in place of 8" in found.text()
    assert found.plain()["changes"][0]["devices"] == 16


def test_only_stages_that_recompute_in_addition_are_named():
    closest = evolve(PLAN, memory=MemoryPolicy((0,)))
    assert "stage 1 of the closest plan" in answer(WORDS[RECOMPUTE][0], plan=closest).text()


def test_what_does_not_fit():
    found = answer()
    text = found.text().splitlines()
    assert text[0].startswith("nothing found fits: device 1 ('")
    assert "needs 350 B at 1F2 and may hold 200 B; smallest change that fits: none was found" in text[0]
    assert text[1] == "  comes closest: by hand of 2 stages"
    assert text[2] == "  device 1 holds at 1F2: saved 300 B, parameters 50 B"
    plain = found.plain()
    assert (plain["feasible"], plain["device"], plain["action"]) == (False, 1, "1F2")
    assert (plain["needs_bytes"], plain["limit_bytes"], plain["too_large_operator"]) == (350, 200, None)


def test_operator_that_no_device_can_hold_is_named():
    found = answer(large=OpNode("big", 1, 1, 1, 0, 0, 100, 200, 30))
    assert "no device can hold operator 'big': it alone needs 330 B while it runs" in found.text()
    assert found.plain()["too_large_operator"] == "big"


def test_refusal_prints_data_only_with_json(monkeypatch, capsys):
    monkeypatch.setattr(module, "InfeasibleAnswer", lambda nothing, request: answer())
    for json, printed in ((True, '"feasible": false'), (False, "")):
        with pytest.raises(InfeasibleError, match="nothing found fits"):
            refuse(None, SimpleNamespace(), json=json)
        out = capsys.readouterr().out
        assert printed in out
        assert bool(out) is json
