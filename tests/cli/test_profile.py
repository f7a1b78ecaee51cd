"""``panpipe profile``: operators measured, a device fitted, residuals shown, and a file that the catalogue reads."""

import json

import pytest
import torch
from panpipe.answers import kernel_profile
from panpipe.answers.kernel_profile import Case, bundled_cases
from panpipe.answers.profile_operators import described_device
from panpipe.cli import main
from panpipe.core.cluster.catalog import find_cluster, find_device
from panpipe.core.cluster.catalog.find import device_type


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """The smallest cases of every kind, and a short link."""
    threads = torch.get_num_threads()
    everything = bundled_cases

    def small(device, dtype, scale=1):
        kinds: dict[tuple[str, ...], int] = {}
        for case in everything(device, dtype, scale):
            calls = tuple(case.calls)
            kinds[calls] = kinds.get(calls, 0) + 1
            if kinds[calls] <= 2:
                yield case

    monkeypatch.setattr(kernel_profile, "bundled_cases", small)
    monkeypatch.setattr(kernel_profile, "BATCH_S", 1e-4)
    monkeypatch.setattr(kernel_profile, "HOST_CACHES", 1)
    yield
    torch.set_num_threads(threads)


def run(capsys, *arguments):
    status = main(["profile", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_profile_measures_every_kind_and_prints_residuals(tmp_path, capsys):
    out = tmp_path / "host.toml"
    status, text, _ = run(capsys, "--repeats", 1, "--json", "--out", out, "--name", "here")
    assert status == 0
    answer = json.loads(text)
    assert set(answer["kinds"]) == {
        "matmul", "attention", "convolution", "normalisation", "elementwise", "gather"
    }  # fmt: skip
    assert answer["like"] == "cpu-core"
    for operator in answer["operators"]:
        assert min(operator[key] for key in ("measured_s", "fitted_s", "held_out_s")) > 0
    for kind, told in answer["kinds"].items():
        own = [o for o in answer["operators"] if o["kind"] == kind]
        errors = {o["name"]: abs(o["held_out_s"] / o["measured_s"] - 1) for o in own}
        assert told["operators"] == len(own) >= 4
        assert told["worst_error"] == pytest.approx(max(errors.values()))
        assert errors[told["worst"]] == told["worst_error"]
    read = device_type(find_cluster(f"{out}#2xhere"), 1)
    for name, value in answer["fitted"].items():
        assert dict(read.numbers())[name] == pytest.approx(value, rel=1e-3)
        assert "held-out error" in read.sources[name].text
        assert not read.sources[name].assumed
    assert answer["link"]["bytes_per_s"] > 0
    assert answer["link"]["latency_s"] > 0


def test_profile_prints_the_efficiency_of_each_kind(capsys):
    status, text, err = run(capsys, "--repeats", 1)
    assert status == 0
    assert "measuring on" in err
    assert "held out" in text
    assert "elementwise" in text
    assert "Launch" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--dtype", "int8"), "'int8': use one of fp32"),
        (("--device", "tpu"), "there is no device 'tpu' to measure on: use cpu or cuda"),
        (("--like", "H1000"), "H1000"),
        (("--name", "H100", "--out", "host.toml"), "device 'H100' is in the catalogue already"),
        (("--out", "nowhere/host.toml"), "there is no folder 'nowhere'"),
    ],
)
def test_a_wrong_request_is_status_2(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, *flags)
    assert (status, out) == (2, "")
    assert message in err


def test_kernels_of_bundled_cases_are_those_that_torch_counts():
    (product,) = (case for case in bundled_cases(torch.device("cpu"), torch.float32) if case.name == "64×256×256")
    assert isinstance(product, Case)
    for name, (call, kernel) in product.calls.items():
        assert kernel.kind == "matmul", name
        assert kernel.flops == 2 * 64 * 256 * 256
        assert isinstance(call(), torch.Tensor)


@pytest.mark.parametrize(("own", "known"), [
    ("NVIDIA A100-SXM4-40GB", "A100-40GB"), ("NVIDIA A100-PCIE-80GB", "A100-PCIe-80GB"), ("NVIDIA H200", "H200"),
    ("NVIDIA GeForce RTX 3090", "RTX3090"), ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H100 PCIe", "H100-PCIe"),
])  # fmt: skip
def test_gpu_is_the_device_of_the_catalogue_with_most_of_its_name(monkeypatch, own, known):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: own)
    assert described_device(None, "cuda") == find_device(known)
