"""Plug-ins that cannot be used are reported and do not prevent others."""

import os
import subprocess
import sys


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
