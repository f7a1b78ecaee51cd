"""The version of panpipe, installed or not."""

import tomllib
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path


def version() -> str:
    """The installed version, or that of the sources where panpipe is imported from them, not installed."""
    try:
        return installed_version("panpipe")
    except PackageNotFoundError:
        with (Path(__file__).parents[1] / "pyproject.toml").open("rb") as file:
            found: str = tomllib.load(file)["project"]["version"]
        return found
