"""Models with DTensor parameters: sharded over a device mesh by torch, for tensor parallelism or FSDP."""

import sys

from torch import nn

from ...errors import RequestError


def refuse_distributed_tensors(model: nn.Module) -> None:
    """Refuse a model whose parameters or buffers are DTensors.

    Raises:
        RequestError: one is; the message names it.
    """
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:  # then there is no DTensor
        return
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, module.DTensor):
            placed = ", ".join(map(str, tensor.placements))
            raise RequestError(
                f"'{name}' is a DTensor ({placed} on {tensor.device_mesh}): stages have whole parameters, "
                "without tensor parallelism or FSDP inside; give the model before parallelize_module or fully_shard"
            )
