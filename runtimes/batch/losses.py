"""Computes the mean over microbatches by the same operations on every device, so that it has the same bits.

Contrastive losses, pairs in halves of a batch, and means over weights of classes have another value if a batch is cut:
users are warned. Tracing finds the operators that may relate samples (`core/capture/batch/row_rules.py`); both values,
computed with the model's own weights, decide. BatchNorm and dropout are off: what they change is documented, and no
error of the loss.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode

from ...core.capture.batch.batch_dims import BatchDims
from ...core.capture.batch.find_batch_dims import RowTrace
from ...core.capture.batch.row_rules import JOINT
from ...core.capture.python.changes import Changes, isolated
from ...core.capture.python.guards import Guards
from ...core.capture.regions.breaks import StepFunction
from ...core.capture.values.containers import flatten_batch, plain_result
from ...core.errors import warn_caller
from ..microbatches import split_batch


def mean_loss(
    losses: Iterable[Tensor], weights: Iterable[Any], weighted: bool, as_numbers: bool = False
) -> tuple[Tensor, Any]:
    """The mean of a batch's losses, summed in their own dtype, microbatch by microbatch.

    Args:
        losses: of each microbatch, without a gradient.
        weights: of each: a number or a tensor.
        weighted: whether the step returned the weights; otherwise they are shares of the batch, whose sum is 1.
        as_numbers: whether weights that are tensors count as Python numbers, which do not change the dtype of a loss.

    Returns:
        The mean, and the sum of the weights.
    """
    total, sum_of_weights = None, 0.0
    for loss, weight in zip(losses, weights, strict=True):
        part = _applied(torch.mul, loss, weight, as_numbers)
        total = part if total is None else total + part
        sum_of_weights = sum_of_weights + weight
    assert total is not None
    return _applied(torch.div, total, sum_of_weights, as_numbers) if weighted else total, sum_of_weights


def _applied(operator: Callable[[Tensor, Any], Tensor], loss: Tensor, weight: Any, as_numbers: bool) -> Tensor:
    if not as_numbers or not isinstance(weight, Tensor):
        return operator(loss, weight)
    wide = torch.promote_types(loss.dtype, torch.float32)  # in which torch computes with a number
    return operator(loss.to(wide), weight.to(wide)).to(loss.dtype)


def loss_and_weight(result: Any) -> tuple[Any, Any]:
    """The loss that a step returns, and its own weight or None."""
    result = plain_result(result)
    if not isinstance(result, tuple | list):
        return result, None
    parts = [part for part in result if not isinstance(part, dict)]
    return (parts[0], parts[1]) if len(parts) > 1 else (parts[0], None)


_OTHER_IN_TRAINING = (nn.modules.batchnorm._BatchNorm, nn.RNNBase, nn.MultiheadAttention)
"""Modules that compute by the batch, or drop out, in training alone."""
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-4}
"""Relative difference of losses up to which it is rounding; 2 % in 16 bits, and of steps that draw random numbers."""


_MOST_ON_CPU = 1_000_000_000
"""Largest number of parameters of a model whose losses are computed on the CPU."""


class _WithoutDropout(TorchFunctionMode):
    """A mode in which functions of dropout return their input."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if "dropout" in name:
            return args[0] if args else kwargs["input"]
        if name == "scaled_dot_product_attention":
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            elif "dropout_p" in kwargs:
                kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)


def warn_if_cut_changes_loss(
    model: nn.Module, step: StepFunction, batch: Any, dims: BatchDims, microbatches: int, trace: RowTrace | None
) -> None:
    """Warn with the operator, its line and both values; the model, gradients and random numbers do not change.

    Args:
        trace: of the step with another number of samples; None if it could not be traced.
    """
    findings = () if trace is None else trace.findings
    if trace is None or trace.error is not None or not findings:
        return
    values = whole_and_mean(model, step, batch, dims, microbatches, trace.written)
    if values is not None:
        found = next((finding for finding in findings if finding.kind == JOINT), findings[0])
        warn_caller(
            f"{found} relates samples of the batch: the loss is {values[0]:.6g} for the whole batch and "
            f"{values[1]:.6g} as the mean over its {microbatches} microbatches, which is trained. For a mean over "
            "something else than samples, such as tokens or weights of classes, return (loss, weight); for a sum, "
            "return the mean; for a tensor of the batch that belongs to no sample give batch_dims= with None; if each "
            "sample needs the others, use fewer microbatches",
        )


def whole_and_mean(
    model: nn.Module, step: StepFunction, batch: Any, dims: BatchDims, microbatches: int, written: frozenset[str]
) -> tuple[float, float] | None:
    """The loss of the whole batch, and the weighted mean over its microbatches, if they differ.

    Args:
        model, step, batch, dims, microbatches: as of `warn_if_cut_changes_loss`.
        written: names of the parameters and buffers that the step writes.

    Returns:
        None if they are equal but for rounding, or cannot be computed without a backward, tensors are on meta, or a
        large model is on the CPU.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if any(tensor.is_meta or type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors.values()):
        return None
    device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
    if device.type == "cpu" and sum(tensor.numel() for tensor in tensors.values()) > _MOST_ON_CPU:
        return None
    pieces = split_batch(batch, microbatches, dims, fewer=True)
    copied = written | dict(model.named_buffers()).keys()

    def loss_of(batches: list[Any], weights: list[float]) -> Tensor:
        copies = {name: tensors[name].detach().clone() for name in tensors if name in copied}
        with torch.no_grad(), _reparametrize_module(model, copies):
            losses, own = zip(*(loss_and_weight(step(model, _on(device, one))) for one in batches), strict=True)
        return mean_loss(losses, weights if own[0] is None else own, own[0] is not None)[0]

    with isolated(model, Changes(Guards(model, step), lambda value: True)), _WithoutDropout():
        for module in model.modules():
            if isinstance(module, _OTHER_IN_TRAINING):
                module.training = False
        state = torch.get_rng_state()
        try:
            whole = loss_of([batch], [1.0])
            random = not torch.equal(state, torch.get_rng_state())
            again = loss_of([batch], [1.0]) if random else whole
            mean = loss_of([piece.batch for piece in pieces], [piece.weight for piece in pieces])
        except Exception:  # the step needs a backward, or a value that a microbatch lacks: training reports it
            return None
    half = any(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in tensors.values())
    rounding = 2e-2 if random or half else _ROUNDING.get(whole.dtype, 2e-2)
    found, noise = (float(whole), float(mean)), abs(float(whole) - float(again))
    near = max(rounding * max(map(abs, found)), 5 * noise, 1e-9)
    return found if near < abs(found[0] - found[1]) < math.inf else None


def _on(device: torch.device, batch: Any) -> Any:
    leaves, nesting = flatten_batch(batch)
    return nesting.batch([leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in leaves])
