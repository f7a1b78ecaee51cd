"""The answer of ``panpipe profile``: which device is measured and described, and the fitted numbers in its words."""

import json

import pytest
import torch
from panpipe.answers import profile_operators as module
from panpipe.answers.profile_operators import described_device, fit_device
from panpipe.core.analytic.calibration import Calibration, Residual, Sample
from panpipe.core.analytic.kernels import Kernel
from panpipe.core.cluster.catalog import find_device

BASE = find_device("cpu-core")
CPU = torch.device("cpu")


def residual(name, kind, measured, fitted, held_out):
    return Residual(Sample(name, name, (Kernel(name, kind, "fp32", 8, 8, 8, 8),), measured), fitted, held_out)


FOUND = Calibration(
    BASE,
    (
        residual("mm", "matmul", 1.0, 1.1, 1.2),
        residual("bmm", "matmul", 2.0, 2.0, 2.0),
        residual("add", "elementwise", 4.0, 3.0, 2.0),
    ),
    ("efficiency.matmul", "launch_overhead_s"),
)


@pytest.fixture
def measured(monkeypatch):
    """A profile without measurements."""
    given = []
    monkeypatch.setattr(module, "_samples", lambda *what: given.append(what) or ["sample"])
    monkeypatch.setattr(
        module, "calibrate", lambda samples, base, products: given.append((samples, base, products)) or FOUND
    )
    monkeypatch.setattr(module, "_link", lambda where: (2e9, 3e-6))
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    return given


def profiled(out=None, dtype="fp32", json=True):
    allowed = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        fit_device(None, CPU, BASE, dtype, 3, 5, "mine", out, json=json)
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = allowed


def test_name_of_a_gpu_finds_the_longest_name_in_the_catalogue(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module, "catalogue", lambda: type("Catalogue", (), {"devices": ["x1", "x1-80gb", "y2"]}))
    monkeypatch.setattr(module, "find_device", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA X1-80GB")
    assert described_device(None, "cuda") == "x1-80gb"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA X1 40GB")
    assert described_device(None, "cuda") == "x1"


def test_data_has_the_fitted_numbers_and_the_errors_of_each_kind(measured, capsys):
    profiled(dtype="tf32")
    found = json.loads(capsys.readouterr().out)
    assert measured == [3, (None, CPU, "tf32", 5), (["sample"], BASE, "tf32")]
    assert found["like"] == "cpu-core"
    assert set(found["fitted"]) == {"efficiency.matmul", "launch_overhead_s"}
    matmul = found["kinds"]["matmul"]
    assert (matmul["operators"], matmul["worst"]) == (2, "mm")
    assert (matmul["fitted_median_error"], matmul["median_error"], matmul["worst_error"]) == pytest.approx(
        (0.05, 0.1, 0.2)
    )
    assert found["median_error"] == pytest.approx(0.2)
    assert found["link"] == {"bytes_per_s": 2e9, "latency_s": 3e-6}
    assert found["operators"][2] == {
        "name": "add", "kind": "elementwise", "measured_s": 4.0, "fitted_s": 3.0, "held_out_s": 2.0
    }  # fmt: skip


def test_text_and_file_have_the_fit_and_its_held_out_errors(measured, capsys, tmp_path):
    profiled(tmp_path / "devices.toml", json=False)
    text = capsys.readouterr().out
    assert "peak rates of cpu-core" in text
    assert "Between two threads 2.0 GB/s" in text
    assert f"Written to {tmp_path / 'devices.toml'}: plan with --cluster {tmp_path / 'devices.toml'}#2xmine" in text
    written = (tmp_path / "devices.toml").read_text()
    assert "2 operators, held-out error 10% in the median, 20% at worst" in written  # of the kind's own operators
    assert "3 operators, held-out error 20% in the median, 50% at worst" in written  # of all
    assert "messages between two threads" in written
