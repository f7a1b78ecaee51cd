"""The catalogue: devices, links, nodes and clusters as data, each number with its source."""

from ..device_type import DeviceType
from .catalogue import Catalogue, catalogue, find_device
from .find import device_type, find_cluster, required_type
from .parts import LinkType, NamedCluster, NodeType

__all__ = [
    "Catalogue",
    "DeviceType",
    "LinkType",
    "NamedCluster",
    "NodeType",
    "catalogue",
    "device_type",
    "find_cluster",
    "find_device",
    "required_type",
]
