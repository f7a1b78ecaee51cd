"""The benchmark of a GPU at toy size on the CPU, so that its first run on a GPU is not its first."""

import importlib
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
LEASE = ROOT / "benchmarks" / "gpu" / "lease.sh"
PARTS = ("offload", "memory", "predictions", "steps")


@pytest.fixture(scope="module")
def gpu():
    """The benchmark's script."""
    before = list(sys.path)
    sys.path.insert(0, str(LEASE.parent))
    yield importlib.import_module("run_part")
    sys.path[:] = before  # the script has added the root


def lasts_s(call):
    """Part → its limit in seconds."""
    lines = LEASE.read_text(encoding="utf-8").partition(f"\n{call})\n")[2].partition(";;")[0]
    found = re.findall(r"^    (?:part|run|tests) (\w+) (\d+)", lines, re.MULTILINE)
    assert len(found) == len(re.findall(r"^    \w", lines, re.MULTILINE))
    return {name: int(limit) for name, limit in found}


def test_calls_fit_into_a_lease_and_run_every_part(gpu):
    first, second = (lasts_s(call) for call in ("first", "second"))
    assert sum(first.values()) <= 300
    assert sum(second.values()) <= 410
    assert max([*first.values(), *second.values()]) <= 90
    assert {*first, *second} >= set(gpu.PARTS) == set(PARTS)


def lease(tmp_path, *arguments, interpreter="#!/bin/sh\necho $1 $2 $3\n[ $2 != offload ]\n"):
    """Run the script with a program in place of Python."""
    (tmp_path / "python").write_text(interpreter, encoding="utf-8")
    (tmp_path / "python").chmod(0o700)
    more = {"PY": str(tmp_path / "python"), "OUT": str(tmp_path / "out")}
    return subprocess.run(
        ["bash", str(LEASE), *arguments], env={**os.environ, **more}, capture_output=True, text=True, check=False
    )


def test_part_that_fails_stops_no_other_and_all_output_is_packed(tmp_path):
    done = lease(tmp_path, "first")
    assert done.returncode == 1
    states = dict(re.findall(r"^## (\w+): status (\d+)", done.stdout, re.MULTILINE))
    assert states.pop("device") in ("0", "127")
    assert states == {name: "1" if name == "offload" else "0" for name in lasts_s("first") if name != "device"}
    with tarfile.open(tmp_path / "out" / "first.tgz") as packed:
        texts = {Path(each.name).stem: packed.extractfile(each).read().decode() for each in packed if each.isfile()}
    assert set(texts) == set(lasts_s("first"))
    assert texts["offload"] == "benchmarks/gpu/run_part.py offload --out\n"
    assert texts["order"].startswith("-m pytest")


def test_part_that_takes_too_long_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setenv("LIMIT", "1")
    done = lease(tmp_path, "second", interpreter="#!/bin/sh\n[ $2 != memory ] || exec sleep 60\n")
    assert re.search(r"## memory: status 124 after \d of 1 s", done.stdout)


def test_call_that_is_not_there_is_refused(tmp_path):
    done = lease(tmp_path, "third")
    assert (done.returncode, done.stderr) == (2, "there is no call 'third': give first, second or tests\n")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "offload")) for name in PARTS])
def test_part_runs_on_the_cpu_at_toy_size(gpu, name):
    found = dict(gpu.PARTS[name](gpu.TOY))
    assert json.loads(json.dumps(found)) == found
    assert all(each.get("losses_apart", 0) < 1e-2 for each in found.values())
    if name == "memory":
        assert "failure" not in {key for each in found.values() for key in each}
        mixed = found["recompute and offload"]
        assert mixed["recomputed stages"] == 2
        assert mixed["OFFLOAD"]["bytes"] == mixed["RELOAD"]["bytes"] > 0
        assert 0 <= mixed["OFFLOAD"]["during compute"] <= 1
    if name == "predictions":
        assert [found[f"width {width}"]["saved bytes"]["off_by_percent"] for width in gpu.TOY.widths] == [0] * 3
    if name == "steps":
        assert list(found) == ["eager", "1 stages", "2 stages"]
        assert all("losses_apart" in each for each in list(found.values())[1:])


def test_cuda_is_initialized_before_what_the_last_measurement_held_is_freed(gpu, monkeypatch):
    called = []
    monkeypatch.setattr(torch.cuda, "init", lambda: called.append("init"))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: called.append("clear"), raising=False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: called.append("empty"))
    gpu.clear(gpu.Size())
    assert called == ["init", "clear", "empty"]


def test_results_are_written_as_they_are_found(gpu, tmp_path, monkeypatch, capsys):
    def stopped(size):
        yield "first", {"found": 1}
        raise RuntimeError("the GPU is gone")

    monkeypatch.setitem(gpu.PARTS, "steps", stopped)
    monkeypatch.setattr(sys, "argv", ["run_part.py", "steps", "--toy", "--out", str(tmp_path)])
    with pytest.raises(RuntimeError, match="the GPU is gone"):
        gpu.main()
    written = json.loads((tmp_path / "steps.json").read_text(encoding="utf-8"))
    assert written.pop("versions")["torch"] == torch.__version__
    assert written == {"first": {"found": 1}}
    assert capsys.readouterr().out == '{"first": {"found": 1}}\n'


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_parts_need_a_gpu_or_toy_size(gpu, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run_part.py", "steps"])
    assert gpu.main() == 2
    assert "PyTorch finds no GPU here" in capsys.readouterr().err
