"""Schedule files, both ways, with the runtime that they come from: ``torch.distributed.pipelining`` over gloo."""

import contextlib
import io
import json
from pathlib import Path

import pytest
from panpipe.cli import main
from panpipe.core.schedules.schedule_csv import parse_schedule_csv

from ..support.launch import forked_script

SCRIPT = Path(__file__).parents[1] / "support" / "ranks" / "torch_ranks.py"
STAGES = {"1f1b": 2, "interleaved-1f1b": 4, "zb-v": 4, "v-half": 4}
MICROBATCHES = 6
TIMES = ("--forward", "2", "--backward-input", "3", "--backward-weight", "1")


def answer(*words: str) -> str:
    """What a command prints, run in this process."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(words) == 0, words
    return out.getvalue()


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with our schedule files, trained there by PyTorch's runtime over two ranks."""
    folder = tmp_path_factory.mktemp("schedules")
    for name in STAGES:
        shape = ("--devices", "2", "--microbatches", str(MICROBATCHES), *TIMES)
        made = answer("schedule", name, *shape, "--csv", str(folder / f"{name}.csv"), "--json")
        (folder / f"{name}.json").write_text(made, encoding="utf-8")
    forked_script(SCRIPT, str(folder), *STAGES)
    return folder


@pytest.mark.parametrize("name", STAGES)
def test_torch_pipelining_trains_from_our_csv_file(trained, name):
    found = [json.loads((trained / f"{name}.{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    gradients = found[0]["gradients"] | found[1]["gradients"]
    assert len(gradients) == 6 * STAGES[name]
    assert all(each < 1e-12 for each in gradients.values())
    losses = [each["loss"] for each in found if each["loss"] is not None]
    assert len(losses) == 1
    assert losses[0] < 1e-14


@pytest.mark.parametrize("name", STAGES)
def test_csv_of_torch_pipelining_validates_and_simulates(trained, name):
    exported = trained / f"{name}.lowered.csv"
    ours, theirs = (
        parse_schedule_csv(path.read_text(encoding="utf-8"), "x") for path in (trained / f"{name}.csv", exported)
    )
    assert theirs.device_actions == ours.device_actions
    assert theirs.lowered is not None
    assert json.loads(answer("validate", str(exported), "--json"))["microbatches"] == MICROBATCHES
    # Equal stages and free messages: PyTorch's order of messages costs nothing, and the step is the order's makespan.
    ran = answer("simulate", str(exported), *TIMES, "--json")
    makespan = json.loads((trained / f"{name}.json").read_text(encoding="utf-8"))["makespan"]
    assert json.loads(ran)["step_s"] == pytest.approx(makespan)
