"""Plug-ins that cannot be used are reported and do not prevent others."""

import os
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
from panpipe.core import plugins
from panpipe.core.errors import RequestError

GROUP = "panpipe.numbers"


@pytest.fixture
def load(monkeypatch, tmp_path):
    """Load entry points, in this order of installation, of a module with these lines."""

    def load(text, names, add):
        (tmp_path / "numbers_of_ours.py").write_text(text, encoding="utf-8")
        points = [EntryPoint(name, f"numbers_of_ours:{name}", GROUP) for name in names]
        monkeypatch.setattr(plugins, "entry_points", lambda group: points if group == GROUP else [])
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "numbers_of_ours", raising=False)
        return plugins.load_plugins(GROUP, add)

    return load


def test_missing_or_refused_plugins_are_returned_and_the_others_are_loaded(load):
    found = []

    def add(number):
        if number > 2:
            raise RequestError(f"{number} is more than 2")
        found.append(number)

    left_out = load("b = 1\na = 2\nc = 3\n", ["b", "c", "gone", "a"], add)
    assert found == [2, 1]
    assert [str(one) for one in left_out] == [
        "number plug-in 'c' (numbers_of_ours:c) is left out: 3 is more than 2",
        "number plug-in 'gone' (numbers_of_ours:gone) is left out: loading it failed with "
        "AttributeError(\"module 'numbers_of_ours' has no attribute 'gone'\")",
    ]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("raise OSError('no driver')", "OSError('no driver')"),
        ("import no_such_module_here", "ModuleNotFoundError"),
        ("import sys; sys.exit(3)", "SystemExit(3)"),
        ("this is no Python", "SyntaxError"),
    ],
)
def test_plugin_that_raises_while_loading_is_returned(load, line, told):
    (one,) = load(line + "\n", ["x"], None)
    assert told in one.reason


def test_package_that_raises_does_not_stop_a_command(tmp_path):
    (tmp_path / "raising.py").write_text("raise OSError('no driver')\n", encoding="utf-8")
    record = tmp_path / "raising-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: raising\nVersion: 1.0\n", encoding="utf-8")
    groups = ("panpipe.backends", "panpipe.devices", "panpipe.schedules")
    (record / "entry_points.txt").write_text(
        "".join(f"[{group}]\nbroken = raising:IT\n" for group in groups), encoding="utf-8"
    )
    script = """
from panpipe.backends.registry import find_backend
from panpipe.core.cluster.catalog import find_device
from panpipe.core.schedules.registry import find_family
print(find_backend("gloo").name, find_device("H100").name, find_family("1f1b").name)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        check=True, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)}, encoding="utf-8",
    )  # fmt: skip
    assert done.stdout.split() == ["gloo", "H100", "1f1b"]
    for kind in ("backend", "device", "schedule"):
        told = f"{kind} plug-in 'broken' (raising:IT) is left out: loading it failed with OSError('no driver')"
        assert done.stderr.count(told) == 1, done.stderr
