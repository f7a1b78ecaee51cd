"""The environment variable that makes all tests offload has pipelines offload, to the same bits."""

import pytest
import torch
from panpipe.runtimes import trainer
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.offload.copies import MemoryArena

from ...support.backends.forced_offload import PLAIN, VARIABLE, force_offload
from ...support.models import CASES
from ...support.parity import PLANS, build

GPT = "tied gpt with dropout"


@pytest.mark.parametrize("wanted", ["1", "late"])
def test_forced_offload_copies_and_changes_no_bit(monkeypatch, wanted):
    batch, losses, copies = CASES[GPT].batch(8, torch.float32), [], []
    for forced in ("", wanted):
        monkeypatch.setenv(VARIABLE, forced)
        monkeypatch.setattr(trainer, "set_up_plan", PLAIN)  # restored after the test, as the next two are
        for name in ("write", "read"):
            monkeypatch.setattr(MemoryArena, name, getattr(MemoryArena, name))
        force_offload()
        pipe = build(ThreadTeam(2), GPT, torch.float32, 8, None, 4, **PLANS["gpipe"])
        losses += [pipe.step(batch).clone()]
        copies.append(sum(len(each.copies) for each in pipe.plan.memory.offload))
        pipe.close()
    assert torch.equal(*losses)
    assert copies[0] == 0 < copies[1]
