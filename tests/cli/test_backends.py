"""``panpipe backends``."""

import json

import pytest
from panpipe.cli import main


def test_the_table_has_every_backend(capsys):
    assert main(["backends"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in ("memcpy", "gloo", "threads", "ranks"))


def test_one_as_json(capsys):
    assert main(["backends", "gloo", "--json"]) == 0
    (only,) = json.loads(capsys.readouterr().out)["backends"]
    assert (only["name"], only["available"], only["runs"], only["built_in"]) == ("gloo", True, ["ranks"], True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nosuch"], "there is no backend 'nosuch': known are memcpy, gloo"),
        (["nosuch", "--check"], "there is no backend 'nosuch': known are memcpy, gloo"),
        (["--check"], "--check runs the suite for one backend"),
    ],
)
def test_refused_in_one_line(arguments, said, capsys):
    assert main(["backends", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"panpipe: {said}")
