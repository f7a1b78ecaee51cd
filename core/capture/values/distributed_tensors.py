"""DTensor parameters: sharded over a device mesh by torch, for tensor parallelism or FSDP."""

import sys
from typing import Any

from torch import nn

from ...errors import RequestError


def distributed_tensors(model: nn.Module) -> dict[str, Any]:
    """The parameters and buffers that are DTensors, by name; tied ones under each of their names."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:  # then there is no DTensor
        return {}
    values = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: value for name, value in values if isinstance(value, module.DTensor)}


def refuse_distributed_tensors(model: nn.Module) -> None:
    """Refuse a model whose parameters or buffers are DTensors.

    Raises:
        RequestError: one is; the message names it.
    """
    for name, tensor in distributed_tensors(model).items():
        placed = ", ".join(map(str, tensor.placements))
        raise RequestError(
            f"'{name}' is a DTensor ({placed} on {tensor.device_mesh}): stages have whole parameters, without tensor "
            "parallelism or FSDP inside; give the model before parallelize_module or fully_shard"
        )
