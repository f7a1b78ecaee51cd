"""``panpipe catalog``: its tables, files and JSON."""

import json

import pytest
from panpipe.cli import main
from panpipe.core.cluster.catalog import catalogue, find_cluster
from panpipe.core.cluster.cluster import read_cluster


def run(capsys, *arguments):
    status = main(["catalog", *map(str, arguments)])
    return status, *capsys.readouterr()


def test_the_tables_have_every_entry(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    status, out, _ = run(capsys)
    assert status == 0
    known = catalogue()
    for name in (*known.devices, *known.links, *known.clusters):
        assert name in out


def test_json_has_each_number_with_its_source(capsys):
    status, out, err = run(capsys, "--json")
    assert (status, err) == (0, "")
    answer = json.loads(out)
    devices = {device["name"]: device for device in answer["devices"]}
    assert devices["A100-40GB"]["peak_flops_per_s"]["bf16"] == {
        "value": 312e12,
        "source": "NVIDIA A100 datasheet, dense rates",
    }
    assert set(devices["A100-40GB"]["reserve_bytes"]) == {"value", "assumed"}
    assert {link["name"] for link in answer["links"]} == set(catalogue().links)
    assert {node["name"] for node in answer["nodes"]} == set(catalogue().nodes)
    assert {cluster["name"]: cluster["devices"] for cluster in answer["clusters"]}["5x8xA100-80GB"] == 40


def test_show_prints_links_paths_and_memory(capsys):
    status, out, _ = run(capsys, "show", "8xRTX3090")
    assert status == 0
    assert "8 × RTX3090, 23.00 GB each for a plan" in out
    row = next(line for line in out.splitlines() if line.startswith("gpu2 "))
    assert row.split() == ["gpu2", "2", "24", "GB/s", "14", "µs", "pcie0", "host0", "pcie2"]


def test_catalog_writes_files(capsys, tmp_path):
    out, svg = tmp_path / "cluster.json", tmp_path / "cluster.svg"
    status, _, err = run(capsys, "show", "2x4xA100-80GB:nics=4", "--out", out, "--svg", svg)
    assert status == 0
    assert str(out).encode("utf-8", "backslashreplace").decode() in err  # undecodable parts of TMPDIR are escaped
    assert read_cluster(out) == find_cluster("2x4xA100-80GB:nics=4")
    assert svg.read_text(encoding="utf-8").startswith("<svg")
    shown = json.loads(run(capsys, "show", out, "--json")[1])
    assert len(shown["devices"]) == 8
    assert {hub["kind"] for hub in shown["hubs"] if isinstance(hub, dict)} == {"pcie", "host", "nic"}


def test_catalogue_file_adds_to_the_catalogue(capsys, tmp_path):
    file = tmp_path / "lab.toml"
    file.write_text('format = "panpipe.catalog/1"\n[devices.Lab]\nlike = "H200"\ntitle = "Our own"\n', encoding="utf-8")
    assert "Lab" in run(capsys, "--file", file)[1]
    assert run(capsys, "show", "Lab", "--file", file)[1].startswith("Lab: Our own")
    shown = json.loads(run(capsys, "show", "2xLab", "--file", file, "--json")[1])
    assert shown["types"][0]["name"] == "Lab"


def test_a_cluster_with_a_fault_is_not_reported_as_unknown(capsys, tmp_path):
    file = tmp_path / "lab.toml"
    text = '[clusters.lab]\ntitle = "The lab"\ngroups = [{ node = "A100-80GB", gpus = 3000 }]\n'
    file.write_text(f'format = "panpipe.catalog/1"\n{text}', encoding="utf-8")
    status, _, err = run(capsys, "show", "lab", "--file", file)
    assert status == 2
    assert "lab.toml: 3000xA100-80GB asks for 3000 devices in a node" in err


BAD = {
    "unknown": (
        ("show", "8xA100-40"),
        "there is no device type 'A100-40': did you mean A100-40GB",
    ),
    "unknown link": (("show", "nvlink3"), "there is no link type 'nvlink3': did you mean nvlink3-port"),
    "unknown link of a cluster": (
        ("show", "2x8xH100:nic=8"),
        "nic=8 of cluster '2x8xH100:nic=8': there is no link type '8'",
    ),
    "a word of titles": (("show", "infinband"), "is in the title of nic-200g, nic-400g"),
    "nothing to show": (("show",), "'catalog show' is incomplete"),
    "another verb": (("draw", "8xH100"), "'catalog draw 8xH100' is incomplete"),
    "a drawing of all": (("--svg", "x.svg"), "--svg needs one cluster"),
    "a drawing of a device": (("show", "H100", "--svg", "x.svg"), "'H100' is a device or link: write 1xH100"),
    "nowhere": (("show", "8xH100", "--out", "no/such/file"), "cannot write 'no/such/file'"),
    "no such file": (("--file", "none.toml"), "cannot read 'none.toml'"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_a_wrong_request_is_one_line_and_status_2(capsys, arguments, message):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
