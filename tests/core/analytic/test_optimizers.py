"""What optimizers keep and move, compared with torch's own and the papers' counts."""

import pytest
import torch
from panpipe.core.analytic.optimizers import find_optimizer

TORCH = {
    "adam": torch.optim.AdamW,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizer_state_has_the_bytes_of_torchs(name, dtype):
    parameter = torch.nn.Parameter(torch.zeros(1000, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    optimizer = TORCH[name]([parameter])
    optimizer.step()
    kept = [parameter, parameter.grad, *optimizer.state[parameter].values()]
    size = sum(tensor.nbytes for tensor in kept if isinstance(tensor, torch.Tensor) and tensor.numel() > 1)
    assert find_optimizer(name).state_bytes(dtype.itemsize) * 1000 == size


def test_mixed_precision_keeps_16_bytes_a_parameter():
    """ZeRO (arXiv 1910.02054), section 3.1: 2 + 2 + 12."""
    mixed = find_optimizer("adam-master")
    assert mixed.state_bytes(2) == 16
    assert mixed.state_bytes(4) == find_optimizer("adam").state_bytes(4) == 16
    assert mixed.state_bytes(8) == 32  # a double needs no copy in less
