"""Look up clusters by name or file.

``4x8xA100-80GB`` is 4 nodes of 8 devices each, ``8xH100`` or ``4xH100`` one node or a part of it, ``H100`` one device.
``4xH100+4xA100-80GB`` joins different nodes by one network. Parameters of the nodes follow a colon, as in
``4x8xA100-80GB:nics=8,nic=nic-400g``.
"""

import os
import re
from pathlib import Path
from typing import Any

from attrs import evolve

from ...errors import RequestError, naming
from ...files.limits import CATALOGUE, short
from ...files.read import read_text
from ...wording import nearest
from ..cluster import Cluster, fully_connected, read_cluster
from ..device_type import DeviceType
from .build import build
from .catalogue import ANY_NODE, Catalogue, catalogue, find_device
from .parts import PARAMETERS, Group

CPU = re.compile(r"(?:cpu|local):(\d{1,7})")
CPU_TYPE, CPU_LINK = "cpu-core", "host-memory"


def find_cluster(name: str | Path) -> Cluster:
    """The cluster of that name, or of the file at that path.

    Args:
        name: one of the catalogue's; a name such as ``4x8xA100-80GB`` (see above); ``cpu:N`` (or ``local:N``),
            N workers of this host with an equal share of its memory each; a cluster file (JSON); or a catalogue file
            (TOML) with one cluster, or ``FILE#NAME`` if it has several.

    Raises:
        RequestError: neither a name nor a readable file; the message has the nearest names.
    """
    text = str(name)
    path, _, inside = text.partition("#")
    if os.path.isfile(text):
        return _of_toml(text, "") if text.endswith(".toml") else _of_json(text)
    if path.endswith(".toml") and (inside or isinstance(name, Path)):
        return _of_toml(path, inside)
    if isinstance(name, Path) or text.endswith((".json", ".toml")) or os.sep in text:
        return _of_json(text)
    match = CPU.fullmatch(text)
    if match is None and text.startswith(("cpu:", "local:")):
        raise RequestError(
            f"cluster {short(text)} has no number of workers of at most 7 digits: write cpu:N, such as cpu:2 for two "
            "of this host"
        )
    return _workers(int(match[1]), text) if match else named_cluster(catalogue(), text)


def device_type(cluster: Cluster, device: int) -> DeviceType | None:
    """The type of a cluster's device: one of the cluster's own, or the catalogue's; None if it has none.

    Raises:
        RequestError: neither has it.
    """
    name = cluster.devices[device].type
    if name is None:
        return None
    own = next((kind for kind in cluster.types if kind.name == name), None)
    return own or find_device(name)


def required_type(cluster: Cluster, device: int) -> DeviceType:
    """The type of a cluster's device, from which a model's costs are computed.

    Raises:
        RequestError: it has none, or it is unknown.
    """
    found = device_type(cluster, device)
    if found is None:
        raise RequestError(
            f"device '{cluster.devices[device].name}' of the cluster has no type, so a model's costs are unknown: "
            "give it one from the catalogue (panpipe catalog), plan for cpu:N or from an operator-graph file, or give "
            "a plan with a prediction"
        )
    return found


def _of_json(path: str) -> Cluster:
    cluster = read_cluster(path)
    own = {kind.name for kind in cluster.types}
    for name in dict.fromkeys(device.type for device in cluster.devices if device.type is not None):
        if name not in own:
            try:
                find_device(name)
            except RequestError as error:
                raise RequestError(f"{path}: {error}; or describe it under types") from None
    return cluster


def _of_toml(path: str, name: str) -> Cluster:
    known = catalogue()
    extended = known.with_file(read_text(path, CATALOGUE), path)
    own = [cluster for cluster in extended.clusters if cluster not in known.clusters]
    if not name and len(own) != 1:
        devices = [f"2x{device}" for device in extended.devices if device not in known.devices]
        example = next(iter((*own, *devices)), "8xH100")
        raise RequestError(f"{path} has {len(own) or 'no'} clusters: name one as in {path}#{example}")
    with naming(path):
        return cluster_in(extended, name or own[0])


def cluster_in(extended: Catalogue, name: str) -> Cluster:
    """The named cluster of an extended catalogue, with the device types that panpipe's catalogue does not have.

    Raises:
        RequestError: there is none.
    """
    cluster = named_cluster(extended, name)
    known = catalogue().devices
    names = dict.fromkeys(device.type for device in cluster.devices if device.type is not None)
    return evolve(cluster, types=tuple(extended.device(name) for name in names if name not in known))


def _workers(count: int, name: str) -> Cluster:
    """Workers of this host, each one core with an equal share of the memory."""
    if count < 1:
        raise RequestError(f"'{name}' has {count} workers: a cluster needs at least 1")
    link = catalogue().link(CPU_LINK)
    cluster = fully_connected(count, host_memory_bytes() // count, link.effective_bytes_per_s, link.latency_s)
    return evolve(cluster, devices=tuple(evolve(device, type=CPU_TYPE) for device in cluster.devices))


def host_memory_bytes() -> int:
    """Physical memory of this host."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


GROUP = re.compile(r"(?:(?:(\d{1,7})[x×])?(\d{1,7})[x×])?([^+:]+)", re.IGNORECASE)
TRUTH = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}


def named_cluster(catalogue: Catalogue, name: str) -> Cluster:
    """The cluster of a name.

    Raises:
        RequestError: the name is neither known nor a list of nodes; the message has the nearest names.
    """
    groups: list[Group] = []
    for part in name.split("+"):
        what, _, parameters = part.strip().partition(":")
        given = _parameters(parameters, name)
        known = catalogue.clusters.get(what)
        found = known.groups if known is not None else (_group(catalogue, what, name),)
        groups += [evolve(group, parameters={**group.parameters, **given}) for group in found]
    for group in groups:
        for link in ("nic", "socket_link"):
            if link in group.parameters:
                with naming(f"{link}={group.parameters[link]} of cluster '{name}'"):
                    catalogue.link(group.parameters[link])
    return build(catalogue, groups)


def _group(catalogue: Catalogue, text: str, name: str) -> Group:
    match = GROUP.fullmatch(text)
    if match is None:
        raise RequestError(_unknown(catalogue, name))
    nodes, gpus, kind = match.groups()
    if "=" in kind:
        what, _, parameters = text.partition(",")
        raise RequestError(f"cluster '{name}': parameters of nodes follow a colon; write it as {what}:{parameters}")
    try:
        catalogue.node(kind)
    except RequestError as error:
        if gpus is None:
            raise RequestError(_unknown(catalogue, name)) from None
        raise RequestError(f"cluster '{name}': {error}") from None
    return Group(kind, int(gpus or 1), int(nodes or 1))


def _unknown(catalogue: Catalogue, name: str) -> str:
    known = [*catalogue.clusters, *catalogue.devices, *(node for node in catalogue.nodes if node != ANY_NODE)]
    hint = nearest(name, dict.fromkeys(known), "panpipe catalog")
    return (
        f"there is no cluster '{name}': {hint}; or write NODESxDEVICESxTYPE as in "
        "4x8xA100-80GB, cpu:N (local:N) for N workers of this host, or the path of a cluster file"
    )


def _parameters(text: str, name: str) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key not in PARAMETERS:
            raise RequestError(f"'{part}' in cluster '{name}': {nearest(key, PARAMETERS)}; write it as nics=8")
        try:
            given[key] = TRUTH[value.casefold()] if PARAMETERS[key] is bool else PARAMETERS[key](value)
        except (ValueError, KeyError):
            rule = "write it as in nics=8 or rails=no"
            raise RequestError(f"'{part}' in cluster '{name}': {value!r} is not a value of {key}; {rule}") from None
    return given
