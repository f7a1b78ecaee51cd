"""The benchmark of a GPU at toy size on the CPU, so that its first run on a GPU is not its first."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"
PARTS = (
    "versions", "parity", "steps", "calls", "queues", "loading", "nccl", "offload", "prediction", "compiled_steps",
    "graphs",
)  # fmt: skip
SLOW = ("versions", "prediction", "compiled_steps", "graphs")


@pytest.fixture(scope="module")
def modules():
    """The benchmark's two modules."""
    before = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module("gpu"), importlib.import_module("gpu_parts")
    sys.path[:] = before  # the script has added the root


def test_every_part_has_a_time_limit_and_together_they_fit_into_a_lease(modules):
    gpu, parts = modules
    assert tuple(gpu.LIMITS_S) == tuple(part.__name__ for part in parts.PARTS) == PARTS
    assert sum(gpu.LIMITS_S.values()) < 20 * 60


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in PARTS])
def test_part_runs_on_the_cpu_at_toy_size(modules, name):
    _, parts = modules
    found = getattr(parts, name)(parts.TOY)
    assert json.loads(json.dumps(found)) == found
    if name == "parity":
        assert [found[kind]["parameters apart"] < 0.05 for kind in ("bfloat16", "autocast bfloat16")] == [True, True]
    if name == "steps":
        assert set(found) == {"eager", "2 stages"}
    if name == "compiled_steps":
        assert set(found) == {"torch.compile", "2 stages"}
    if name == "graphs":
        assert set(found) == {"not compiled", "compile=eager"}
        assert all(one["equal"] == {"bits": True, "apart": 0} for one in found.values())
    if name == "versions":
        assert found["torch"] == torch.__version__
        assert any("attention" in kernel for kernel in found["float32"])


def test_results_of_parts_that_fail_or_take_too_long_have_the_reason(modules, tmp_path, monkeypatch):
    gpu, _ = modules
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "import").mkdir()
    variables = gpu.environment(tmp_path / "import")
    monkeypatch.setitem(gpu.LIMITS_S, "queues", 900)  # a busy machine needs long to import torch
    assert gpu.run("queues", out, True, variables)["waiting"] == 0
    monkeypatch.setitem(gpu.LIMITS_S, "calls", 0.2)
    assert gpu.run("calls", out, True, variables)["failure"] == "it took more than 0.2 s"
    assert "failure" in json.loads((out / "calls.json").read_text(encoding="utf-8"))


def test_a_part_that_is_not_there_is_refused(modules, monkeypatch, capsys):
    gpu, _ = modules
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--parts", "steps,nothing"])
    assert gpu.main() == 2
    assert "there is no part 'nothing': known are versions, parity" in capsys.readouterr().err
