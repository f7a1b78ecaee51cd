"""The catalogue's numbers against published ones, and what other packages add."""

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from attrs import evolve
from panpipe.core import plugins
from panpipe.core.cluster.catalog import catalogue, find_device
from panpipe.core.cluster.catalog.catalogue import GROUP
from panpipe.core.cluster.device_type import COMPUTE_KINDS, MEMORY_KINDS
from panpipe.core.errors import RequestError

DEVICES = {
    # name: (fp32, tf32, fp16 in TFLOP/s, memory in GB, its GB/s, host link)
    "RTX3090": (35.6, 35.6, 71, 24, 936, "pcie4-x16"),
    "A100-40GB": (19.5, 156, 312, 40, 1555, "pcie4-x16"),
    "A100-80GB": (19.5, 156, 312, 80, 2039, "pcie4-x16"),
    "A100-PCIe-40GB": (19.5, 156, 312, 40, 1555, "pcie4-x16"),
    "A100-PCIe-80GB": (19.5, 156, 312, 80, 1935, "pcie4-x16"),
    "H100": (66.9, 494.7, 989.4, 80, 3350, "pcie5-x16"),
    "H200": (66.9, 494.7, 989, 141, 4800, "pcie5-x16"),
    "B200": (80, 1100, 2250, 180, 8000, "pcie5-x16"),
    "GH200": (66.9, 494.7, 989.4, 96, 4000, "nvlink-c2c-gh200"),
    "GB200": (80, 1250, 2500, 186, 8000, "nvlink-c2c-gb200"),
    "GB300": (80, 1250, 2500, 279, 8000, "nvlink-c2c-gb300"),
    "L40S": (91.6, 183, 362, 48, 864, "pcie4-x16"),
    "V100-16GB": (15.7, None, 125, 16, 900, "pcie3-x16"),
    "V100-32GB": (15.7, None, 125, 32, 900, "pcie3-x16"),
    "T4": (8.1, None, 65, 16, 320, "pcie3-x16"),
    "L4": (30.3, 60, 121, 24, 300, "pcie4-x16"),
    "A10": (31.2, 62.5, 125, 24, 600, "pcie4-x16"),
    "A30": (10.3, 82, 165, 24, 933, "pcie4-x16"),
    "RTX4090": (82.6, 82.6, 165.2, 24, 1008, "pcie4-x16"),
    "RTX5090": (104.8, 104.8, 209.5, 32, 1792, "pcie5-x16"),
    "H100-PCIe": (51.2, 378, 756, 80, 2039, "pcie5-x16"),
    "H20": (44, 74, 148, 96, 4000, "pcie5-x16"),
    "MI300X": (163.4, 653.7, 1307.4, 192, 5300, "pcie5-x16"),
}
"""Dense peaks as their vendors print them."""

FP8 = {"H100": 1978.9, "H200": 1979, "B200": 4500, "GH200": 1978.9, "GB200": 5000, "GB300": 5000, "L40S": 733,
       "L4": 242.5, "RTX4090": 330.3, "RTX5090": 419, "H100-PCIe": 1513, "H20": 296, "MI300X": 2614.9}  # fmt: skip
"""TFLOP/s of dense products in FP8; the others have none."""


@pytest.mark.parametrize("name", DEVICES)
def test_devices_have_the_vendors_peaks(name):
    device = find_device(name)
    rates = device.peak_flops_per_s
    fp32, tf32, fp16, memory, rate, link = DEVICES[name]
    wanted = {"fp32": fp32, "fp16": fp16, **({} if tf32 is None else {"tf32": tf32, "bf16": fp16})}
    wanted |= {"fp8": FP8[name]} if name in FP8 else {}
    assert {kind: value / 1e12 for kind, value in rates.items()} == pytest.approx(wanted)
    found = device.memory_bytes / 1e9, device.peak_memory_bytes_per_s / 1e9
    assert (*found, device.host_link) == (memory, rate, link)


def test_every_device_of_the_catalogue_has_a_tested_peak():
    assert {*DEVICES, "cpu-core"} == set(catalogue().devices)


def test_achieved_rates_are_published_or_measured_ones():
    h200 = find_device("H200")
    assert 770e12 <= h200.efficiency["matmul"] * h200.peak_flops_per_s["bf16"] <= 800e12
    assert h200.effective_memory_bytes_per_s == 4.3e12


def test_latencies_add_up_to_those_of_whole_paths():
    latency = {name: link.latency_s for name, link in catalogue().links.items()}
    assert 2 * latency["nvlink3-port"] == pytest.approx(12e-6)
    assert latency["nvlink3-bridge"] == pytest.approx(12e-6)
    assert 4 * latency["pcie4-x16"] == pytest.approx(14e-6)
    assert 4 * latency["pcie5-x16"] + 2 * latency["nic-400g"] == pytest.approx(22e-6)


@pytest.mark.parametrize("section", ["devices", "links", "nodes"])
def test_every_number_has_a_source_or_says_that_it_is_assumed(section):
    for name, entry in getattr(catalogue(), section).items():
        assert entry.sources, name
        assert all(source.text.strip() for source in entry.sources.values()), name
    for device in catalogue().devices.values():
        assert {path for path, _ in device.numbers()} == set(device.sources)
        assert set(device.efficiency) == {*COMPUTE_KINDS, *MEMORY_KINDS}


@pytest.mark.parametrize("name", ["a100-80gb", "A100 80GB", "A100-SXM4-80GB"])
def test_names_are_found_by_aliases_and_in_any_spelling(name):
    assert find_device(name) is find_device("A100-80GB")


def test_an_unknown_device_names_the_nearest():
    with pytest.raises(RequestError, match="no device type 'H1000': did you mean H100"):
        find_device("H1000")


# Plug-ins.

MINE = evolve(find_device("H100"), name="H100-mine", aliases=())


@pytest.fixture
def plugged(monkeypatch):
    """Pretend that packages with these entry points are installed."""

    def install(**added):
        for name, plugin in added.items():
            monkeypatch.setattr(plugins, name, plugin, raising=False)
        points = [EntryPoint(name, f"panpipe.core.plugins:{name}", GROUP) for name in added]
        points.append(EntryPoint("absent", "no_such_module_here:DEVICE", GROUP))
        monkeypatch.setattr(plugins, "entry_points", lambda group: points if group == GROUP else [])
        catalogue.cache_clear()
        return catalogue

    yield install
    catalogue.cache_clear()


def test_plugins_add_devices_and_broken_ones_are_named(plugged, tmp_path):
    file = tmp_path / "lab.toml"
    file.write_text('format = "panpipe.catalog/1"\n[devices.Lab]\nlike = "H200"\ntitle = "Our own"\n', encoding="utf-8")
    broken = tmp_path / "broken.toml"
    broken.write_text('format = "panpipe.catalog/1"\n[devices.H100]\n', encoding="utf-8")
    load = plugged(
        ONE=MINE,
        SEVERAL=[evolve(MINE, name="H100-b"), evolve(MINE, name="H100-c")],
        FILE=Path(file),
        TAKEN=evolve(MINE, name="H200"),
        NUMBER=3,
        BROKEN=broken,
    )
    with pytest.warns(UserWarning, match="is left out") as caught:
        found = load()
    assert set(found.devices) - {*DEVICES, "cpu-core"} == {"H100-mine", "H100-b", "H100-c", "Lab"}
    assert found.device("Lab").memory_bytes == 141_000_000_000
    told = sorted(str(warning.message) for warning in caught)
    expected = (
        ("'BROKEN'", "device 'H100' is in the catalogue already"),
        ("'NUMBER'", "it is a int, not a DeviceType"),
        ("'TAKEN'", "the name 'H200' is taken"),
        ("'absent'", "ModuleNotFoundError"),
    )
    for message, parts in zip(told, expected, strict=True):
        assert all(part in message for part in parts), message
