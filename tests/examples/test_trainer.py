"""The example of transformers' Trainer on two ranks: logs, checkpoints of both kinds, resuming."""

import json
from pathlib import Path

import pytest

from ..support.launch import torchrun_script

EXAMPLE = Path(__file__).parents[2] / "examples" / "trainer.py"


def losses(folder):
    history = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    return [(entry["step"], entry[name]) for entry in history for name in ("loss", "eval_loss") if name in entry]


@pytest.mark.slow
def test_trainer_of_two_ranks_trains_resumes_and_saves_as_one_process(tmp_path):
    from transformers import GPT2LMHeadModel

    for ranks in (1, 2):
        out = tmp_path / str(ranks)
        done = torchrun_script(EXAMPLE, "--out", str(out), ranks=ranks)
        assert done.returncode == 0, done.stderr[-3000:]
        again = torchrun_script(EXAMPLE, "--out", str(out), "--steps", "25", "--resume", ranks=ranks)
        assert again.returncode == 0, again.stderr[-3000:]
    one, two = (losses(tmp_path / ranks / "checkpoint-25") for ranks in "12")
    assert len(one) == len(two) >= 7
    for wanted, found in zip(one, two, strict=True):
        assert found == pytest.approx(wanted, rel=1e-3)
    models = [GPT2LMHeadModel.from_pretrained(tmp_path / ranks) for ranks in "12"]
    for (name, first), second in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert (first - second).norm() < 1e-2 * first.norm(), name
