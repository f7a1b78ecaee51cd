"""Clusters by name or file, for the commands that take one."""

from ..core.cluster.catalog.find import find_cluster, host_memory_bytes

__all__ = ["find_cluster", "host_memory_bytes"]
