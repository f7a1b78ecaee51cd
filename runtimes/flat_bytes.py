"""The bytes of a tensor, for hashes, files and messages that have no notion of its dtype or strides."""

import torch
from torch import Tensor


def flat_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's elements in their order: uint8, of one dimension and stride 1, on the same device.

    It is a view where the elements are adjacent in memory, and a copy otherwise.

    Args:
        tensor: strided; neither conjugate nor negative views are resolved.
    """
    # PyTorch takes a tensor of one element for contiguous with any stride, but views its bytes only with stride 1.
    return tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
