"""A catalogue: devices, links, nodes and clusters by name, read from TOML files of ``panpipe.catalog/1``.

A file has any of the tables ``devices``, ``links``, ``nodes`` and ``clusters``, and ``sources``: names for source texts
that several numbers share. An entry with ``like`` inherits the other entry's fields and overrides those that it gives.

A package adds devices through the entry-point group ``panpipe.devices``: the entry point names a ``DeviceType``,
several of them, or the ``pathlib.Path`` of a catalogue file.
"""

import re
import tomllib
from collections.abc import Iterable, Mapping
from datetime import date, datetime, time
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from attrs import evolve, field, frozen

from ...documents import check_format, converter, reasons
from ...errors import RequestError, warn_caller
from ...files.limits import CATALOGUE, short
from ...files.read import read_text
from ...plugins import load_plugins
from ...wording import letters_of, nearest
from ..device_type import DeviceType, structured_device
from ..sourced import is_number, joined, structured
from .parts import LinkType, NamedCluster, NodeType

FORMAT = "panpipe.catalog/1"
SECTIONS: dict[str, type[Any]] = {"devices": DeviceType, "links": LinkType, "nodes": NodeType}
_ETHERNET = re.compile(r"(\d+)[Gg]b?[Ee]")
ANY_NODE = "any"
"""The node of device types that have no node entry."""

Entry = TypeVar("Entry")


@frozen
class Catalogue:
    """Devices, links, nodes and clusters by name."""

    devices: Mapping[str, DeviceType] = field(factory=dict)
    links: Mapping[str, LinkType] = field(factory=dict)
    nodes: Mapping[str, NodeType] = field(factory=dict)
    clusters: Mapping[str, NamedCluster] = field(factory=dict)

    def device(self, name: str) -> DeviceType:
        """The device type of that name or alias. Raises RequestError if there is none."""
        return _find(self.devices, name, "device type")

    def link(self, name: str) -> LinkType:
        """The link type of that name; ``100GbE`` is ``nic-100g``. Raises RequestError if there is none."""
        ethernet = _ETHERNET.fullmatch(name)
        return _find(self.links, f"nic-{ethernet[1]}g" if ethernet else name, "link type")

    def node(self, name: str) -> NodeType:
        """The node of that name, or the node of that device type. Raises RequestError if there is neither."""
        if name in self.nodes and name != ANY_NODE:
            return self.nodes[name]
        device = self.device(name)
        own = next((node for node in self.nodes.values() if node.device == device.name), None)
        return own or evolve(self.nodes[ANY_NODE], name=device.name, device=device.name)

    def with_file(self, text: str, origin: str) -> "Catalogue":
        """This catalogue with the entries of a file.

        Raises:
            RequestError: the text is no catalogue file, an entry's name is taken, or an entry names an unknown one.
        """
        data = _parsed(text, origin)
        added: dict[str, dict[str, Any]] = {section: {} for section in (*SECTIONS, "clusters")}
        for section in (*SECTIONS, "clusters"):
            for name, table in _entries(data, section, origin).items():
                if name in getattr(self, section):
                    raise RequestError(f"{origin}: {section[:-1]} '{name}' is in the catalogue already: rename it")
                where = f"{section[:-1]} '{name}' of {origin}"
                if section == "clusters":
                    added[section][name] = _cluster(name, table, where)
                else:
                    whole = self._inherited(table, section, data, where)
                    added[section][name] = _structured({"name": name, **whole}, section, where)
        self._check_aliases(added["devices"].values(), origin)
        added["nodes"] |= self._nodes_alike(data.get("devices", {}), added["nodes"])
        result = Catalogue(**{section: {**getattr(self, section), **new} for section, new in added.items()})
        result._check_names(added, origin)
        return result

    def _inherited(self, table: dict[str, Any], section: str, data: dict[str, Any], where: str) -> dict[str, Any]:
        """An entry with the fields that it inherits through ``like``."""
        seen: list[str] = []
        while "like" in table:
            name = table["like"]
            if not isinstance(name, str):
                raise RequestError(f"{where} is like {short(name)}: give the name of an entry in quotes")
            own = {key: value for key, value in table.items() if key != "like"}
            if name in seen:
                raise RequestError(f"{where} is like itself, through {' and '.join(seen)}: give one of them in full")
            seen.append(name)
            if name in data.get(section, {}):
                base = {key: value for key, value in _entries(data, section, where)[name].items() if key != "aliases"}
            elif name in getattr(self, section):
                base = {key: value for key, value in joined(getattr(self, section)[name]).items() if key != "name"}
                base.pop("aliases", None)
            else:
                raise RequestError(
                    f"{where} is like '{name}', which does not exist: {_nearest(name, self, data, section)}"
                )
            table = _merged(base, own)
        return table

    def _check_aliases(self, devices: Iterable[DeviceType], origin: str) -> None:
        """Check that no alias of an added device is the name of an existing device."""
        taken = {
            letters_of(name): device.name for device in self.devices.values() for name in (device.name, *device.aliases)
        }
        for device in devices:
            for alias in device.aliases:
                if letters_of(alias) in taken:
                    raise RequestError(
                        f"{origin}: alias '{alias}' of device '{device.name}' is device '{taken[letters_of(alias)]}': "
                        "leave it out"
                    )

    def _nodes_alike(self, devices: Mapping[str, Any], own: Mapping[str, NodeType]) -> dict[str, NodeType]:
        """Nodes for a file's devices without one: each inherits the node of the device that it is ``like``."""
        nodes = {node.device: node for node in (*self.nodes.values(), *own.values()) if node.device is not None}
        found: dict[str, NodeType] = {}
        for name in devices:
            like = name
            while like not in nodes and "like" in devices.get(like, {}):
                like = devices[like]["like"]
            if like in nodes and like != name and name not in self.nodes and name not in own:
                found[name] = evolve(nodes[like], name=name, title=f"{nodes[like].title}: {name}", device=name)
        return found

    def _check_names(self, added: Mapping[str, Mapping[str, Any]], origin: str) -> None:
        """Check that every entry that the added ones name exists."""
        try:
            for device in added["devices"].values():
                for link in (device.host_link, device.host_copy, device.gpu_link):
                    if link is not None:
                        self.link(link)
            for node in added["nodes"].values():
                self.link(node.socket_link)
                self.link(node.nic)
                if node.device is not None:
                    self.device(node.device)
            for cluster in added["clusters"].values():
                for group in cluster.groups:
                    self.node(group.node)
        except RequestError as error:
            raise RequestError(f"{origin}: {error}") from None


def _structured(table: Mapping[str, Any], section: str, where: str) -> Any:
    return structured_device(table, where) if section == "devices" else structured(table, SECTIONS[section], where)


def _parsed(text: str, origin: str) -> dict[str, Any]:
    data = parse_toml(text, origin)
    check_format(data.pop("format", None), FORMAT, origin)
    unknown = next((key for key in data if key not in (*SECTIONS, "clusters", "sources")), None)
    if unknown is not None:
        raise RequestError(f"{origin} has '{unknown}': known are {', '.join((*SECTIONS, 'clusters', 'sources'))}")
    return data


def _entries(data: dict[str, Any], section: str, origin: str) -> dict[str, dict[str, Any]]:
    """The tables of a section, with the texts of the sources that they name."""
    entries, texts = data.get(section, {}), data.get("sources", {})
    if not isinstance(texts, dict):
        raise RequestError(f'{origin}: sources is not a table: write [sources] with lines such as lab = "…"')
    if not isinstance(entries, dict) or not all(isinstance(table, dict) for table in entries.values()):
        raise RequestError(f"{origin}: {section} is not a table of tables: write [{section}.NAME]")
    return {name: _with_texts(table, texts) for name, table in entries.items()}


def _with_texts(table: dict[str, Any], texts: Mapping[str, str]) -> dict[str, Any]:
    if is_number(table):
        source = table.get("source")
        return {**table, "source": texts[source]} if isinstance(source, str) and source in texts else table
    return {key: _with_texts(value, texts) if isinstance(value, dict) else value for key, value in table.items()}


def _merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in own.items():
        below = merged.get(key)
        if isinstance(value, dict) and isinstance(below, dict) and not is_number(value):
            merged[key] = _merged(below, value)
        else:
            merged[key] = value
    return merged


def _cluster(name: str, table: dict[str, Any], where: str) -> NamedCluster:
    try:
        return converter.structure({"name": name, **table}, NamedCluster)
    except Exception as error:
        raise RequestError(f"{where} is wrong: {reasons(error, name)}") from None


def _find(entries: Mapping[str, Entry], name: str, what: str) -> Entry:
    """The entry of that name or alias; case and punctuation are ignored."""
    if name in entries:
        return entries[name]
    wanted = letters_of(name)
    for known, entry in entries.items():
        if wanted in [letters_of(other) for other in (known, *getattr(entry, "aliases", ()))]:
            return entry
    raise RequestError(f"there is no {what} '{name}': {nearest(name, entries, 'panpipe catalog')}")


def _nearest(name: str, catalogue: Catalogue, data: Mapping[str, Any], section: str) -> str:
    return nearest(name, [*data.get(section, {}), *getattr(catalogue, section)], "panpipe catalog")


LONGEST_LINE = 4096
"""Characters of a line: reading TOML takes time that grows with the square of a line's length."""
LARGEST_WRITTEN = 2**64
"""Integers are below this, and above its negative."""


def parse_toml(text: str, origin: str) -> dict[str, Any]:
    """Read TOML.

    Args:
        text: of the file.
        origin: the name to use for it in errors, usually its path.

    Raises:
        RequestError: it is not TOML, exceeds a limit, or has a date.
    """
    longest = max(map(len, text.splitlines()), default=0)
    if longest > LONGEST_LINE:
        raise RequestError(f"{origin} has a line of {longest} characters: at most {LONGEST_LINE} are read; divide it")
    try:
        data = tomllib.loads(text)
        _check_numbers(data, origin)
    except ValueError as error:  # also an integer of thousands of digits, or a date that does not exist
        raise RequestError(f"{origin} is not a TOML file: {str(error).splitlines()[0]}; correct it") from None
    except RecursionError:
        raise RequestError(f"{origin} is nested too deeply: correct it") from None
    return data


def _check_numbers(data: Any, origin: str) -> None:
    """Refuse dates, and integers outside the limit."""
    below = data.values() if isinstance(data, dict) else data
    for value in below:
        if isinstance(value, dict | list):
            _check_numbers(value, origin)
        elif isinstance(value, datetime | date | time):
            raise RequestError(f"{origin} has the date {value}: it has texts and numbers only; write it in quotes")
        elif isinstance(value, int) and abs(value) >= LARGEST_WRITTEN:
            raise RequestError(f"{origin} has the integer {short(value)}: give one below {LARGEST_WRITTEN:.4g}")


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
    return evolve(found, devices={**found.devices, **{device.name: device for device in devices}})


def find_device(name: str) -> DeviceType:
    """The device type of that name or alias, such as ``A100-80GB``.

    Raises:
        RequestError: there is none; the message has the nearest names.
    """
    return catalogue().device(name)
