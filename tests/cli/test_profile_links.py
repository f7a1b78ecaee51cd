"""``panpipe profile links``: ranks are started, links are measured, and the file is one that plans are made for."""

import json
import subprocess
import sys

import pytest
from panpipe.cli import main
from panpipe.core.cluster.catalog import find_cluster

from ..support.launch import HANGS_S


@pytest.mark.slow
def test_profile_links_starts_ranks_and_its_cluster_is_planned_for(tmp_path):
    file = tmp_path / "cluster.json"
    panpipe = [sys.executable, "-m", "panpipe"]
    command = [*panpipe, "profile", "links", "--device", "cpu", "--ranks", "2", "--repeats", "2", "--json"]
    command += ["--out", str(file)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=HANGS_S, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [(one["from"], one["to"]) for one in told["alone"]] == [(0, 1), (1, 0)]
    assert all(one["latency_s"] >= 0 and len(one["points"]) == 6 for one in told["alone"])
    assert [cut["group"] for cut in told["together"]] == [[1]]
    assert told["host_copies"] == []
    cluster = find_cluster(str(file))
    assert [device.type for device in cluster.devices] == ["cpu-core"] * 2
    assert cluster.transfer_s(0, 1, 1 << 20) > cluster.transfer_s(0, 1, 1) > 0
    node = {
        "forward_s": 1, "backward_input_s": 1, "backward_weight_s": 1, "optimizer_s": 0, "parameter_bytes": 4,
        "state_bytes": 16, "saved_bytes": 4, "workspace_bytes": 0,
    }  # fmt: skip
    graph = {"format": "panpipe.opgraph/1", "nodes": [{"name": name, **node} for name in "ab"]}
    (tmp_path / "graph.json").write_text(
        json.dumps({**graph, "edges": [{"src": "a", "dst": "b", "bytes": 1000}]}), encoding="utf-8"
    )
    given = ["--graph", str(tmp_path / "graph.json"), "--cluster", str(file), "--microbatches", "4"]
    assert main(["plan", *given, "--out", str(tmp_path / "plan.json"), "--json"]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rings"], "'profile rings' is not a measurement"),
        (["links", "--model", "gpt2"], "'profile links --model' is not a measurement"),
        (["links"], "this process is not one: give --ranks 2 or more"),
        (["links", "--ranks", "1"], "--ranks is 1: give --ranks 2 or more"),
        (["--ranks", "2"], "--ranks is for links: write panpipe profile links --ranks"),
        (["--backend", "gloo"], "--backend is for links"),
        (["links", "--ranks", "2", "--device", "abacus"], "there is no device 'abacus'"),
        (["links", "--ranks", "2", "--out", "/nowhere/cluster.json"], "there is no folder '/nowhere'"),
        (["links", "--ranks", "2", "--backend", "pigeon"], "there is no backend 'pigeon': known are memcpy, gloo"),
        (["links", "--ranks", "2", "--backend", "memcpy"], "backend 'memcpy' connects threads: use --backend gloo"),
    ],
)
def test_wrong_requests_are_refused_before_ranks_are_started(monkeypatch, capsys, arguments, said):
    monkeypatch.setattr(subprocess, "run", None)
    assert main(["profile", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_an_unknown_backend_is_refused_by_the_ranks(monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["profile", "links", "--backend", "pigeon"]) == 2
    assert "there is no backend 'pigeon': known are memcpy, gloo" in capsys.readouterr().err
    assert main(["profile", "links", "--ranks", "2"]) == 2
    assert "--ranks is 2 and the job has 1 ranks" in capsys.readouterr().err
