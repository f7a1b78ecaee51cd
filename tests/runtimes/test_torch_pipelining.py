"""Schedule files, both ways, with the runtime that they come from: ``torch.distributed.pipelining`` over gloo."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from panpipe.core.schedules.schedule_csv import parse_schedule_csv

from ..support.launch import HANGS_S, torchrun_script

SCRIPT = Path(__file__).parents[1] / "support" / "torch_ranks.py"
STAGES = {"1f1b": 2, "interleaved-1f1b": 4, "zb-v": 4, "v-half": 4}
MICROBATCHES = 6
TIMES = ("--forward", "2", "--backward-input", "3", "--backward-weight", "1")


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "panpipe.cli", *words],
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        check=False,
        encoding="utf-8",
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with our schedule files, trained there by PyTorch's runtime over two ranks."""
    folder = tmp_path_factory.mktemp("schedules")
    for name in STAGES:
        shape = ("--devices", "2", "--microbatches", str(MICROBATCHES), *TIMES)
        made = command("schedule", name, *shape, "--csv", str(folder / f"{name}.csv"), "--json")
        assert made.returncode == 0, made.stderr
        (folder / f"{name}.json").write_text(made.stdout, encoding="utf-8")
    done = torchrun_script(SCRIPT, str(folder), *STAGES)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("name", STAGES)
def test_torch_pipelining_trains_from_our_csv_file(trained, name):
    found = [json.loads((trained / f"{name}.{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    gradients = found[0]["gradients"] | found[1]["gradients"]
    assert len(gradients) == 6 * STAGES[name]
    assert max(gradients.values()) < 1e-12
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
    checked = command("validate", str(exported), "--json")
    assert checked.returncode == 0, checked.stderr
    assert json.loads(checked.stdout)["microbatches"] == MICROBATCHES
    # Equal stages and free messages: PyTorch's order of messages costs nothing, and the step is the order's makespan.
    ran = command("simulate", str(exported), *TIMES, "--json")
    assert ran.returncode == 0, ran.stderr
    makespan = json.loads((trained / f"{name}.json").read_text(encoding="utf-8"))["makespan"]
    assert json.loads(ran.stdout)["step_s"] == pytest.approx(makespan)
