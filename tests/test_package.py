"""The package: every folder with code is listed, and the public face is what it says."""

import random
import subprocess
import sys
import tomllib
from pathlib import Path

import panpipe
import pytest

ROOT = Path(__file__).parents[1]


def test_every_package_is_listed():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"])
    tops = {path.parent for path in ROOT.glob("*/__init__.py")}
    folders = {path.parent.relative_to(ROOT) for top in tops for path in top.rglob("__init__.py")}
    assert listed == {"panpipe"} | {"panpipe." + ".".join(folder.parts) for folder in folders}


@pytest.mark.parametrize("name", panpipe.__all__)
def test_public_names_can_be_imported(name):
    assert getattr(panpipe, name) is not None


def test_the_package_has_few_names():
    assert len(panpipe.__all__) <= 25


def test_an_unknown_name_lists_the_known():
    with pytest.raises(AttributeError, match=r"has no attribute 'nothing'; it has .*pipeline"):
        _ = panpipe.nothing


def test_importing_panpipe_imports_no_torch():
    code = "import panpipe, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_first_use_leaves_the_random_numbers_of_python_as_they_were():
    """In a new process, because the packages that draw them are imported once."""
    script = "import random, panpipe; random.seed(5); panpipe.pipeline; print(random.random())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(done.stdout) == random.Random(5).random()
