"""Forks of a rank's process: a child has the memory of its parent, and none of its threads.

A gloo group that is destroyed joins its threads. In a child these do not run, and it would never end: a child destroys
no group, also when its interpreter ends.
"""

import ctypes
import os
from typing import Any
from weakref import WeakSet

import torch.distributed as dist

_HOLDERS = WeakSet[Any]()


def keep_in_forks(holder: Any) -> None:
    """Never destroy an object in a fork of this process, nor anything that it refers to.

    Args:
        holder: has process groups in its attributes.
    """
    _HOLDERS.add(holder)


def _keep() -> None:
    groups = list(dist.distributed_c10d._world.pg_map) if dist.is_available() else []
    for kept in [*_HOLDERS, *groups]:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))  # a reference that nothing removes


os.register_at_fork(after_in_child=_keep)
