"""Builds wheels that contain the machine code of the search, for any CPU of this machine's architecture.

pip calls this file as a build backend: that of setuptools, with numba among the requirements of a wheel, which has its
own compiler. An editable installation compiles when the search is first used, or `core/search/compiling.py` ahead. So
does a wheel on another architecture, another Python or another version of numba. With ``PANPIPE_COMPILE=0`` a wheel has
no machine code.
"""

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from setuptools import build_meta, setup
from setuptools.build_meta import *  # noqa: F403
from setuptools.command.build_py import build_py

COMPILES = os.environ.get("PANPIPE_COMPILE", "1") != "0"


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """What the search imports: everything but torch."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [name for name in project["dependencies"] if COMPILES and not name.startswith("torch")]
    return [*build_meta.get_requires_for_build_wheel(config_settings), *needed]


class BuildWithMachineCode(build_py):
    """Copies the modules, and compiles the search next to them."""

    def run(self) -> None:
        super().run()
        if self.editable_mode or not COMPILES:
            return
        folder = str(Path(self.build_lib).resolve())
        paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {
            "NUMBA_CPU_NAME": "generic",
            "NUMBA_CACHE_DIR": "",
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        print("compiling the search")
        done = subprocess.run(
            [sys.executable, "-m", "panpipe.core.search.compiling"], cwd=folder, env=os.environ | own, check=False
        )
        if done.returncode:
            print("the search could not be compiled here: it will be compiled when it is first used", file=sys.stderr)


if __name__ == "__main__":
    setup(cmdclass={"build_py": BuildWithMachineCode})
