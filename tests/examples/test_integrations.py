"""The examples of lightning, accelerate, PEFT and a loop of one's own, in one process and on ranks."""

import re
from pathlib import Path

import pytest

from ..support.launch import torchrun_script

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "pattern"),
    [
        ("lightning_module.py", r"'train_loss': ([\d.]+)"),
        ("accelerate_loop.py", r"epoch 2: loss ([\d.]+)"),
        ("lora.py", r"step 15: loss ([\d.]+)"),
        ("own_loop.py", r"step 15: loss ([\d.]+)"),
    ],
)
def test_example_on_two_ranks_ends_as_in_one_process(example, pattern, tmp_path):
    ends = []
    for ranks in (1, 2):
        own = ("--mesh", f"pp={ranks}") if example == "own_loop.py" else ("--out", str(tmp_path / str(ranks)))
        done = torchrun_script(EXAMPLES / example, *own, ranks=ranks)
        assert done.returncode == 0, done.stderr[-3000:]
        ends.append(float(re.search(pattern, done.stdout)[1]))
    assert ends[1] == pytest.approx(ends[0], rel=1e-2)
