"""Backends by name and from other packages: a package is installed, found, checked and trained with."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import panpipe
import pytest
import torch
from panpipe.backends import memcpy, registry
from panpipe.backends.conformance import RULES
from panpipe.backends.kind import BackendKind
from panpipe.core.errors import RequestError

from ..support.cuts import captured, even_plan
from ..support.launch import alone, found
from ..support.models import CASES
from ..support.parity import largest

PACKAGE = Path(__file__).parents[1] / "thirdparty_backend"


def test_an_unknown_backend_name_lists_the_known_ones():
    with pytest.raises(RequestError, match=r"^there is no backend 'carrier pigeon': known are memcpy, gloo, nccl$"):
        registry.find_backend("carrier pigeon")


def test_an_unavailable_backend_is_refused_with_its_reason():
    kind = BackendKind("own", "", threads=memcpy.connect, missing=lambda: "there is no such wire")
    with pytest.raises(RequestError, match="'own' cannot be used here: there is no such wire; usable are memcpy, gloo"):
        registry.find_backend(kind)


def test_a_dtype_that_the_backend_lacks_is_refused_before_any_step():
    dtypes = frozenset({torch.float32, torch.float64})
    kind = BackendKind("own", "", threads=memcpy.connect, dtypes=dtypes)
    case, half = CASES["batchnorm with a skip"], torch.bfloat16
    plan = even_plan(captured(case, half, 8, 4), 2, 4)
    with pytest.raises(RequestError, match=r"in bfloat16 and backend 'own' moves float32, float64: .* or use memcpy"):
        panpipe.pipeline(case.model(half), case.step, case.batch(8, half), plan=plan, backend=kind)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A virtual environment with the package, and with one whose backend raises while it is loaded; where its packages
    are, and its Python."""
    folder = tmp_path_factory.mktemp("installed")
    source = shutil.copytree(PACKAGE, folder / "source")  # building writes files next to the package
    # venv and pip write paths as UTF-8, and fail in a locale that cannot read them.
    utf8 = {**os.environ, "PYTHONUTF8": "1"}
    create = [sys.executable, "-m", "venv", "--symlinks", "--without-pip", folder / "venv"]
    subprocess.run(create, check=True, env=utf8)
    (target,) = (folder / "venv").glob("lib/python*/site-packages")
    python = folder / "venv" / "bin" / "python"
    # The environment of these tests is visible there, too: torch, panpipe, and what builds the package offline.
    (target / "outer.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n", encoding="utf-8"
    )
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--no-index")
    subprocess.run([python, "-m", "pip", "install", *options, source], check=True, env=utf8)
    (target / "raising.py").write_text("raise OSError('no driver')\n", encoding="utf-8")
    record = target / "raising-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: raising\nVersion: 1.0\n", encoding="utf-8")
    (record / "entry_points.txt").write_text("[panpipe.backends]\nraising = raising:KIND\n", encoding="utf-8")
    return target, python


def test_an_installed_backend_is_found_next_to_one_that_raises(installed):
    command = [installed[1], "-m", "panpipe", "backends", "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, encoding="utf-8")
    answer = json.loads(done.stdout)
    assert [one["name"] for one in answer["backends"]] == ["memcpy", "gloo", "nccl", "sockets"]
    assert all(one["available"] for one in answer["backends"] if one["name"] != "nccl")
    assert answer["left_out"] == [
        {
            "group": "panpipe.backends",
            "name": "raising",
            "value": "raising:KIND",
            "reason": "loading it failed with OSError('no driver')",
        }
    ]


@pytest.mark.slow
def test_installed_backend_trains_like_one_process(installed, tmp_path):
    for one in alone("plugged", tmp_path, backend="sockets", PYTHONPATH=str(installed[0])):
        assert one.returncode == 0, one.stderr
    for here in found(tmp_path):
        assert here["plugged"].pop("backend") == "sockets"
        assert largest(here["plugged"].values()) < 1e-9


@pytest.mark.slow
def test_installed_backend_conforms(installed):
    command = [installed[1], "-m", "panpipe", "backends", "sockets", "--check", "--json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert answer["conforms"] is True
    assert len(answer["rules"]) == len(RULES)
