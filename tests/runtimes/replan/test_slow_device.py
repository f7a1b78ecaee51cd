"""A device of a running job becomes slower: stages move away from it, and the results have the same bits."""

import re
import statistics
from pathlib import Path

import pytest

from ...support.launch import found, torchrun_script

SCRIPT = Path(__file__).parents[2] / "support" / "ranks" / "drifting.py"
SLOW = 24
"""The step from which the device of rank 1 is slower."""


@pytest.mark.slow
def test_stages_move_away_from_a_device_that_becomes_slower(tmp_path):
    runs = {}
    for name, environment in (("slowed", {"SLOW": str(SLOW)}), ("undisturbed", {})):
        folder = tmp_path / name
        folder.mkdir()
        done = torchrun_script(SCRIPT, str(folder), ranks=2, **environment)
        assert done.returncode == 0, done.stderr[-3000:]
        runs[name] = found(folder)
    bits = {}
    for name, ranks in runs.items():
        bits[name] = ranks[0]["bits"] | ranks[1]["bits"]
        assert ranks[0]["losses"] == ranks[1]["losses"]
        assert ranks[0]["sizes"] == ranks[1]["sizes"]  # all ranks moved at the same step
    assert runs["slowed"][0]["losses"] == runs["undisturbed"][0]["losses"]
    assert bits["slowed"] == bits["undisturbed"]

    first = runs["slowed"][0]
    before, after = first["sizes"][SLOW], first["sizes"][-1]
    assert after[1] < 0.7 * before[1]  # rank 1 has fewer operators
    moved = next(i for i in range(SLOW, len(first["sizes"])) if first["sizes"][i][1] < 0.7 * before[1])
    slow, fast = first["times"][SLOW + 1 : moved - 1], first["times"][moved + 3 :]
    assert statistics.median(fast) < statistics.median(slow)
    lines = [line for _, line in first["lines"]]
    assert any(re.match(r"the fastest of the last \d+ steps took .* ms, and .* ms before", line) for line in lines)
    assert any(re.match(r"device 1 takes .* times as long as the fastest; a faster plan is", line) for line in lines)
    assert any(re.match(r"plan: .*; fastest step .* against .*", line) for line in lines)
