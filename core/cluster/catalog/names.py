"""Clusters by name: those of the catalogue, and names that list their nodes.

``4x8xA100-80GB`` is 4 nodes of 8 devices each, ``8xH100`` or ``4xH100`` one node or a part of it, ``H100`` one device.
``4xH100+4xA100-80GB`` joins different nodes by one network. Parameters of the nodes follow a colon, as in
``4x8xA100-80GB:nics=8,nic=nic-400g``.
"""

import re
from typing import Any

from attrs import evolve

from ...errors import RequestError
from ...name_suggestions import nearest
from ..cluster import Cluster
from .build import build
from .catalogue import ANY_NODE, Catalogue
from .parts import PARAMETERS, Group

GROUP = re.compile(r"(?:(?:(\d{1,7})[x×])?(\d{1,7})[x×])?([^+:]+)", re.IGNORECASE)
TRUTH = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}


def _truth(text: str) -> bool:
    return TRUTH[text.casefold()]


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
            given[key] = _truth(value) if PARAMETERS[key] is bool else PARAMETERS[key](value)
        except (ValueError, KeyError):
            rule = "write it as in nics=8 or rails=no"
            raise RequestError(f"'{part}' in cluster '{name}': {value!r} is not a value of {key}; {rule}") from None
    return given
