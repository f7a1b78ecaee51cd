"""A few hundred mutated files of every format; ``make fuzz`` runs 100,000."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .cases import run_case
from .formats import formats, write_valid

CASES = 20
"""Of each format."""
SEARCHED = ("graph.json", "cluster.json", "small-cluster.json", "catalogue.toml")
"""Formats that plans are searched from: the compiled search may have to be compiled first."""
BOMBS = Path(__file__).parent / "bombs.py"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SEARCHED else name for name in formats()]
)
def test_mutated_file_gives_a_result_or_one_clear_line(name, tmp_path):
    write_valid(tmp_path)
    for index in range(CASES):
        outcome = run_case(name, 1, index, tmp_path)
        assert not outcome.is_fault, f"{name} 1 {index}: {outcome.kind}: {outcome.text}"


@pytest.mark.slow
def test_small_file_that_asks_for_much_is_refused_within_limits_of_time_and_memory():
    done = subprocess.run([sys.executable, BOMBS], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) > 30
    for title, (kind, text) in found.items():
        wanted = ("refused", "accepted", "infeasible") if title in ACCEPTED else ("refused",)
        assert kind in wanted, f"{title}: {kind}: {text}"


ACCEPTED = ("block: period 10^9", "catalogue: gpus = 999")
"""Large, and valid."""
