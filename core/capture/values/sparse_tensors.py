"""Tensors that are not plain: sparse and nested ones are refused as inputs, and operators that create sparse ones stay
Python; DTensors are sharded over a device mesh by torch, for tensor parallelism or FSDP."""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...errors import RequestError


def is_sparse(value: Any) -> bool:
    """Whether a value is a tensor that is not strided."""
    return isinstance(value, Tensor) and value.layout != torch.strided


def refuse_sparse_tensors(model: nn.Module, batch: Any) -> None:
    """Refuse sparse and nested tensors of the model and the batch, and tensors of the model that are inference tensors.

    Raises:
        RequestError: there is one; the message has its name.
    """
    named = [
        *((f"parameter '{name}'", tensor) for name, tensor in model.named_parameters()),
        *((f"buffer '{name}'", tensor) for name, tensor in model.named_buffers()),
    ]
    for name, tensor in named:
        if tensor.is_inference():
            raise RequestError(
                f"{name} was created under torch.inference_mode(), where autograd records nothing of it: build or load "
                "the model outside of it, or under torch.no_grad()"
            )
    batches = [(f"batch{pytree.keystr(path)}", leaf) for path, leaf in pytree.tree_flatten_with_path(batch)[0]]
    for name, value in named + batches:
        refuse_if_not_strided(name, value)


def refuse_if_not_strided(name: str, value: Any) -> None:
    """Refuse a sparse or a nested tensor.

    Raises:
        RequestError: the value is one; the message has its name.
    """
    if isinstance(value, Tensor) and value.is_nested:
        raise RequestError(
            f"{name} is a nested tensor: a pipeline holds and sends strided tensors; pad its parts to one length "
            "(torch.nested.to_padded_tensor), and give the lengths or a mask in addition"
        )
    if is_sparse(value):
        raise RequestError(
            f"{name} is sparse ({value.layout}): a pipeline holds and sends strided tensors; keep its indices and "
            "values as separate tensors, and create the sparse one in a module's forward"
        )


def distributed_tensors(model: nn.Module) -> dict[str, Any]:
    """The parameters and buffers that are DTensors, by name; tied ones under each of their names."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:  # then there is no DTensor
        return {}
    values = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: value for name, value in values if isinstance(value, module.DTensor)}
