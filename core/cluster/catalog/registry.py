"""The catalogue: panpipe's own entries and those that other packages add.

A package adds devices through the entry-point group ``panpipe.devices``: the entry point names a ``DeviceType``,
several of them, or the ``pathlib.Path`` of a catalogue file.
"""

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from ...errors import RequestError, warn_caller
from ...files.limits import CATALOGUE
from ...files.read import read_text
from ...plugins import load_plugins
from ..device_type import DeviceType
from .catalogue import Catalogue

GROUP = "panpipe.devices"
FILES = ("links.toml", "devices.toml", "nodes.toml", "clusters.toml")


@cache
def catalogue() -> Catalogue:
    """All entries by name: panpipe's own, then those of plug-ins.

    A plug-in is skipped, with a warning that names it and its package, if it cannot be loaded, is no device type, or
    has a name that is taken.
    """
    found = Catalogue()
    for name in FILES:
        text = files(__package__).joinpath("data", name).read_text(encoding="utf-8")
        found = found.with_file(text, f"panpipe's {name}")

    def add(plugin: object) -> None:
        nonlocal found
        found = _with_plugin(found, plugin)

    for one in load_plugins(GROUP, add):
        warn_caller(str(one))
    return found


def _with_plugin(found: Catalogue, plugin: Any) -> Catalogue:
    if isinstance(plugin, Path):
        return found.with_file(read_text(plugin, CATALOGUE), str(plugin))
    devices = (plugin,) if isinstance(plugin, DeviceType) else plugin
    if not isinstance(devices, list | tuple) or not all(isinstance(device, DeviceType) for device in devices):
        raise RequestError(f"it is a {type(plugin).__name__}, not a DeviceType, several of them, or a Path")
    taken = next((device.name for device in devices if device.name in found.devices), None)
    if taken is not None:
        raise RequestError(f"the name '{taken}' is taken")
    return found.with_devices(devices)


def find_device(name: str) -> DeviceType:
    """The device type of that name or alias, such as ``A100-80GB``.

    Raises:
        RequestError: there is none; the message has the nearest names.
    """
    return catalogue().device(name)
