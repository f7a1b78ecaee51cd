"""Names of devices that are the same in every process, to detect that two processes use one GPU."""

import socket

import torch


def identity(device: torch.device) -> str:
    """The name of a device on its host; of a GPU by its UUID, independent of CUDA_VISIBLE_DEVICES."""
    if device.type != "cuda":
        return f"{device} of {socket.gethostname()}"
    return f"GPU {getattr(torch.cuda.get_device_properties(device), 'uuid', device)} of {socket.gethostname()}"
