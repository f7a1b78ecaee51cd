"""``panpipe catalog``: its tables, drawings, files and JSON."""

import json

import pytest
from panpipe.answers.bundled_models import BUNDLED
from panpipe.answers.topology import draw, draw_network
from panpipe.cli import main
from panpipe.core.cluster.catalog import catalogue, find_cluster
from panpipe.core.cluster.cluster import Cluster, Device, Hub, read_cluster
from panpipe.core.cluster.routing import Link
from panpipe.core.cluster.topology import topology_of


def run(capsys, *arguments):
    status = main(["catalog", *map(str, arguments)])
    return status, *capsys.readouterr()


def drawn(name, width=80):
    cluster = find_cluster(name)
    return [line for line in draw(cluster, topology_of(cluster), width) if line]


def test_the_tables_have_every_entry_and_where_it_comes_from(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    status, out, _ = run(capsys)
    assert status == 0
    assert "assumed: CUDA" not in out
    status, out, _ = run(capsys, "--sources")
    known = catalogue()
    for name in (*known.devices, *known.links, *known.clusters):
        assert name in out
    assert "assumed: CUDA context, NCCL's buffers and fragmentation" in out
    assert "PipeOffload (arXiv 2503.01328)" in out


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


def test_catalog_show_of_a_device_and_a_link(capsys):
    status, out, _ = run(capsys, "show", "H200")
    assert status == 0
    assert "efficiency.matmul" in out
    assert "0.794" in out
    assert json.loads(run(capsys, "show", "nic-400g", "--json")[1])["effective_bytes_per_s"]["value"] == 48.5e9


A100 = """
     ┌─────┬─────┬─── nvswitch ────┬─────┬─────┐
   gpu0  gpu1  gpu2  gpu3  gpu4  gpu5  gpu6  gpu7
     └pcie0┘     └pcie1┘     └pcie2┘     └pcie3┘
        └── host0 ──┘           └── host1 ──┘
              └───────────────────────┘
"""
RTX3090 = """
     ╭──────╮      ╭──────╮      ╭──────╮      ╭──────╮
   gpu0   gpu1   gpu2   gpu3   gpu4   gpu5   gpu6   gpu7
   pcie0  pcie1  pcie2  pcie3  pcie4  pcie5  pcie6  pcie7
     └────── host0 ┴──────┘      └────── host1 ┴──────┘
               └───────────────────────────┘
"""
TWO_NODES = """
node0 … node1, 2 alike: 4 × A100-80GB
      ┌──────── nvswitch ────────┐
    gpu0     gpu1     gpu2     gpu3
      └─pcie0──┘        └─pcie1──┘
          ├nic0             ├nic1
          └───── host0 ─────┘
network
          node0  node1
  rail0 ──nic0───nic0────┬── spine
  rail1 ──nic1───nic1────┘
"""


@pytest.mark.parametrize(
    ("name", "lines"), [("8xA100-40GB", A100), ("8xRTX3090", RTX3090), ("2x4xA100-80GB", TWO_NODES)]
)
def test_topology_of_known_clusters_is_drawn_as_recorded(name, lines):
    assert drawn(name) == lines.strip("\n").split("\n")


@pytest.mark.parametrize("name", ["8x8xH100", "64x8xH100", "5x8xA100-80GB:nics=8", "4xH100+4xA100-80GB"])
def test_drawings_fit_into_80_columns(name):
    lines = drawn(name, 78)
    assert max(map(len, lines)) <= 80
    assert any("spine" in line for line in lines)


def test_drawing_of_many_nodes_omits_the_middle_ones():
    lines = draw_network(topology_of(find_cluster("64x8xH100")), 78)
    assert lines[0].split()[-2:] == ["…", "node63"]
    assert len(lines) == 9


def test_a_single_switch_has_no_brace():
    lines = draw_network(topology_of(find_cluster("2x2xH100:rails=no,nics=2")), 78)
    assert lines[1] == "network ──nic0,nic1──nic0,nic1"


def test_links_that_are_not_drawn_are_listed_or_counted():
    assert drawn("cpu:4") == ["  4 devices, a separate link between every two"]
    chain = Cluster(
        tuple(Device(f"d{i}", 1) for i in range(50)),
        links=tuple(Link(f"d{i}", f"d{i + 1}", 5e9, 1e-6) for i in range(49)),
    )
    lines = [line for line in draw(chain, topology_of(chain), 80) if line]
    assert lines[0].split() == ["d0", "──", "d1", "5", "GB/s", "1", "µs"]
    assert lines[-1] == "  … and 9 more"
    assert drawn("1xL40S", width=3)[0].split()[:3] == ["gpu0", "──", "pcie0"]


def test_devices_at_the_host_itself_are_drawn():
    cluster = Cluster(
        (Device("a", 1), Device("b", 1)),
        (Hub("host", "host"),),
        (Link("a", "host", 1e9, 1e-6), Link("b", "host", 1e9, 1e-6)),
    )
    assert draw(cluster, topology_of(cluster), 80)[:3] == ["   a  b", "   │  │", "   host"]


def test_show_prints_links_paths_and_memory(capsys):
    status, out, _ = run(capsys, "show", "8xRTX3090")
    assert status == 0
    assert "8 × RTX3090, 23.00 GB each for a plan" in out
    row = next(line for line in out.splitlines() if line.startswith("gpu2 "))
    assert row.split() == ["gpu2", "2", "24", "GB/s", "14", "µs", "pcie0", "host0", "pcie2"]


def test_catalog_show_of_an_alias_is_that_of_its_device(capsys):
    assert run(capsys, "show", "A100-SXM-40GB") == run(capsys, "show", "A100-40GB")
    assert run(capsys, "show", "1xA100")[1].startswith("1xA100: 1 device\n")


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


BAD = {
    "unknown": (
        ("show", "8xA100-40"),
        "there is no device type 'A100-40': did you mean A100-40GB",
    ),
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


def test_names_of_devices_are_whole_in_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["catalog"]) == 0
    assert sum(line.startswith("A100-PCIe-40GB ") for line in capsys.readouterr().out.splitlines()) == 2


def test_bundled_models_are_listed(capsys):
    assert main(["catalog", "--models"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in BUNDLED)
    assert main(["catalog", "--models", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["models"]
    assert [row["model"] for row in found] == list(BUNDLED)
    assert main(["catalog", "show", "H100", "--models"]) == 2
    assert "--models lists the bundled models" in capsys.readouterr().err
