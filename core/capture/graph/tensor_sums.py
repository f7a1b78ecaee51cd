"""The all-reduce over the tensor ranks of a stage, as an operator of a captured graph.

A model of one tensor rank computes with its own part of each weight, and calls this operator where the parts of a
result are summed. Its gradient is the sum of all ranks' gradients: the same operator again. So a block with two
all-reduces in its forward has two in its backward, as in Megatron-LM (arXiv 1909.08053, section 3).
"""

from typing import Any

import torch
from torch import Tensor

SUM, MAX = "sum", "max"

_library = torch.library.Library("panpipe_tensor", "DEF")
_library.define("all_reduce(Tensor part, str operation) -> Tensor")
ALL_REDUCE = torch.ops.panpipe_tensor.all_reduce.default


def _fake(part: Tensor, operation: str) -> Tensor:
    return torch.empty_like(part)


def _save(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.operation = inputs[1]


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
    assert ctx.operation == SUM  # a maximum is taken of detached tensors only
    return ALL_REDUCE(gradient, SUM), None


torch.library.register_fake("panpipe_tensor::all_reduce", _fake, lib=_library)
torch.library.register_autograd("panpipe_tensor::all_reduce", _differentiate, setup_context=_save, lib=_library)
