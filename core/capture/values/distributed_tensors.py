"""DTensor parameters: sharded over a device mesh by torch, for tensor parallelism or FSDP."""

import sys
from typing import Any

from torch import nn


def distributed_tensors(model: nn.Module) -> dict[str, Any]:
    """The parameters and buffers that are DTensors, by name; tied ones under each of their names."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:  # then there is no DTensor
        return {}
    values = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: value for name, value in values if isinstance(value, module.DTensor)}
