"""Clusters by name or file, for the commands with ``--cluster``."""

from ..core.cluster.catalog.find import find_cluster, host_memory_bytes

__all__ = ["find_cluster", "host_memory_bytes"]
