"""The padding of an embedding whose rows are divided: it is a row of one rank alone."""

from typing import Any

import torch

_EMBEDDING = torch.ops.aten.embedding.default


def with_own_padding(func: torch._ops.OpOverload, args: Any) -> Any:
    """The arguments of an embedding whose padding is counted in this rank's rows.

    DTensor passes ``padding_idx`` on to each rank's rows, so each rank would leave out the gradient of another row.
    """
    if func is not _EMBEDDING or len(args) < 3 or args[2] < 0 or not hasattr(args[0], "placements"):
        return args
    (placement,) = args[0].placements
    if not placement.is_shard(0):
        return args
    mesh = args[0].device_mesh
    rows = args[0].shape[0] // mesh.size()
    own = args[2] - mesh.get_local_rank() * rows
    return (*args[:2], own if 0 <= own < rows else -1, *args[3:])
