"""``panpipe profile links``: ranks are started, links are measured, and the file is one that plans are made for."""

import json
import subprocess
import sys

import pytest
import torch
from panpipe.cli import main
from panpipe.core.cluster.catalog import find_cluster
from panpipe.core.cluster.links.shared import groups_to_measure
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.profile.link_measurements import TOGETHER_BYTES, measure_links, rounds, total_rate, undisturbed

from ..support.launch import HANGS_S

CPU = torch.device("cpu")


@pytest.mark.slow
def test_profile_links_starts_ranks_and_its_cluster_is_planned_for(tmp_path):
    file = tmp_path / "cluster.json"
    panpipe = [sys.executable, "-m", "panpipe.cli"]
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


def test_every_pair_direction_and_group_is_measured():
    groups = groups_to_measure(["host"] * 3)
    found = measure_links(ThreadTeam(3), lambda _: CPU, groups, (64, 1 << 16), 2)
    assert list(found.alone) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert all(list(times) == [64, 1 << 16] and min(times.values()) > 0 for times in found.alone.values())
    assert set(found.together) == set(groups)
    assert min(found.together.values()) > 0


def test_rate_of_flows_counts_until_the_first_ends():
    first, second = [1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 5.0, 9.0]
    assert total_rate([first]) == TOGETHER_BYTES
    assert total_rate([first, second], 10) == pytest.approx((4 + 2.5) * 10 / 4)


@pytest.mark.parametrize(("repeats", "shared"), [(1, [1]), (3, [1, 1, 1]), (20, [5, 5, 5, 5]), (22, [6, 6, 5, 5])])
def test_sizes_are_measured_in_turns(repeats, shared):
    assert rounds(repeats) == shared


def test_a_disturbance_of_half_the_rounds_changes_no_time():
    quiet = [1.0, 1.01, 1.02, 1.03, 1.04] * 2
    assert undisturbed([*quiet, *(50 * time for time in quiet)]) == pytest.approx(1.02, abs=0.021)
    assert undisturbed([3.0]) == 3.0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rings"], "'profile rings' is not a measurement"),
        (["links", "--model", "gpt2"], "'profile links --model' is not a measurement"),
        (["links"], "this is none: give --ranks 2 or more"),
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
    assert "--ranks 2 in a job of 1 ranks" in capsys.readouterr().err


def test_one_device_and_odd_sizes_are_refused():
    from panpipe.core.errors import RequestError

    with pytest.raises(RequestError, match="1 device has no links"):
        measure_links(ThreadTeam(1), lambda _: CPU, [])
    with pytest.raises(RequestError, match="a message of 6 bytes: sizes are multiples of 4"):
        measure_links(ThreadTeam(2), lambda _: CPU, [], (6,))
