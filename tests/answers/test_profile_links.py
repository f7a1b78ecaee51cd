"""The answer of ``panpipe profile links``, and what it refuses before any rank starts."""

import json
import subprocess
from types import SimpleNamespace

import pytest
import torch
from panpipe.answers import profile_links as module
from panpipe.answers.profile_links import LinkProfile, profile_links
from panpipe.core.cluster.cluster import Cluster, Device, Link
from panpipe.core.cluster.links.lines import fit_line
from panpipe.core.cluster.links.shared import Cut, SharedLinks
from panpipe.core.errors import RequestError
from panpipe.runtimes.profile.offload_rates import MeasuredCopy

CPU = torch.device("cpu")
LINE = fit_line((1000, 2000, 3000), (2e-6, 3e-6, 4e-6))  # 1 µs, and 1 GB/s


@pytest.fixture
def found():
    links = (Link("device0", "device1", 1e9, 1e-6),)
    cluster = Cluster((Device("device0", 10, "cpu-core"), Device("device1", 10, "cpu-core")), (), links)
    tree = SharedLinks((), links, {"device1": frozenset({1})}, (Cut(frozenset({1}), 2e9, 1e9, 1e9),))
    return LinkProfile(cluster, {(0, 1): LINE, (1, 0): LINE}, tree, [MeasuredCopy(True, False, LINE)], "a machine")


@pytest.fixture
def ranked(monkeypatch, found):
    def rank(number):
        monkeypatch.setenv("RANK", str(number))
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setattr(module, "_measure", lambda *given: found)

    return rank


def profiled(ranks=None, backend=None, out=None, json=True):
    return profile_links(CPU, "cpu-core", ranks, backend, 3, out, json)


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [(None, "and this process is not one: give --ranks 2"), (1, "and --ranks is 1: give --ranks 2 or more")],
)
def test_less_than_two_ranks_are_refused(monkeypatch, ranks, reason):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RequestError, match=f"links are measured between ranks, {reason}"):
        profiled(ranks)


def test_backend_of_threads_is_refused(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RequestError, match="backend 'memcpy' connects threads: use --backend gloo"):
        profiled(2, "memcpy")


def test_ranks_run_the_same_command(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("sys.argv", ["panpipe", "profile", "links", "--ranks", "3"])
    started = []

    def run(command, env, check):
        started.append((command, env["OMP_NUM_THREADS"], check))
        return SimpleNamespace(returncode=5)

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(subprocess, "run", run)
    assert profiled(3, "gloo") == 5
    ((command, threads, check),) = started
    assert command[command.index("--nproc-per-node") + 1] == "3"
    assert command[-5:] == ["panpipe", "profile", "links", "--ranks", "3"]
    assert (threads, check) == ("1", False)


def test_number_of_ranks_that_the_job_has_not_is_refused(ranked):
    ranked(0)
    with pytest.raises(RequestError, match="--ranks is 3 and the job has 2 ranks: leave it out under torchrun"):
        profiled(3)


def test_data_has_each_pair_and_each_group_with_its_fit(ranked, capsys):
    ranked(0)
    assert profiled(2) == 0
    found = json.loads(capsys.readouterr().out)
    first = found["alone"][0]
    assert (first["from"], first["to"], found["machine"]) == (0, 1, "a machine")
    assert (first["latency_s"], first["bytes_per_s"]) == pytest.approx((1e-6, 1e9))
    assert first["predicted_bytes_per_s"] == 1e9
    assert [point["bytes"] for point in first["points"]] == [1000, 2000, 3000]
    assert found["together"][0]["group"] == [1]
    assert found["together"][0]["error"] == 0.5
    assert found["shared"] == {"device1": [1]}
    assert found["links"] == [{"a": "device0", "b": "device1", "bytes_per_s": 1e9, "latency_s": 1e-6}]
    assert (found["host_copies"][0]["to_host"], found["host_copies"][0]["pinned"]) == (True, False)


def test_only_the_first_rank_prints_and_writes(ranked, capsys, tmp_path):
    ranked(1)
    assert profiled(out=tmp_path / "cluster.json") == 0
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "cluster.json").exists()


def test_text_and_file_have_the_shared_links(ranked, capsys, tmp_path):
    ranked(0)
    profiled(out=tmp_path / "cluster.json", json=False)
    text = capsys.readouterr().out
    assert "0 → 1" in text
    assert "50%" in text
    assert "device0 – device1: " in text
    assert ", shared by 1" in text
    assert "to pageable host memory: " in text
    written = json.loads((tmp_path / "cluster.json").read_text())
    assert written["links"][0]["bytes_per_s"] == 1e9
