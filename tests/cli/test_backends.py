"""``panpipe backends``."""

import json

import pytest
import torch
from attrs import evolve
from panpipe.backends import gloo
from panpipe.cli import main


def test_the_table_has_every_backend(capsys):
    assert main(["backends"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in ("memcpy", "gloo", "threads", "ranks"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nosuch"], "there is no backend 'nosuch': known are memcpy, gloo"),
        (["nosuch", "--check"], "there is no backend 'nosuch': known are memcpy, gloo"),
        (["--check"], "--check runs the suite for one backend"),
    ],
)
def test_wrong_backends_requests_are_refused_in_one_line(arguments, said, capsys):
    assert main(["backends", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"panpipe: {said}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_conformance_suite_runs_on_request(capsys):
    assert main(["backends", "gloo", "--check", "--on", "cuda"]) == 2
    assert "tensors on cuda need a GPU and PyTorch finds none: check on cpu" in capsys.readouterr().err
    assert main(["backends", "memcpy", "--check", "--on", "xpu"]) == 2
    assert "'memcpy' sends no tensors on xpu: try cpu, cuda" in capsys.readouterr().err


def test_limits_of_a_backend_are_printed(capsys, monkeypatch):
    few = evolve(gloo.KIND, limits=lambda: "it carries little")
    monkeypatch.setattr("panpipe.cli.backends.known_backends", lambda: {"gloo": few})
    assert main(["backends", "gloo"]) == 0
    assert "gloo: it carries little" in capsys.readouterr().out
    assert main(["backends", "gloo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["backends"][0]["limits"] == "it carries little"
