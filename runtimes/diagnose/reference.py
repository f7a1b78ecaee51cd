"""The reference for comparisons: plain eager PyTorch in one process, on the same microbatches."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from ...core.capture.batch.batch_dims import AUTO, place_samples
from ...core.capture.graph.autograd_functions import without_checkpoints
from ...core.capture.graph.randomness import KeyedRandom, random_key
from ...core.capture.regions.breaks import StepFunction
from ...core.errors import RequestError
from ..batch.losses import loss_and_weight, mean_loss
from ..microbatches import split_batch


def reference_step(
    model: nn.Module,
    step: StepFunction,
    batch: Any,
    *,
    microbatches: int,
    seed: int = 0,
    index: int = 0,
    scaler: GradScaler | None = None,
    batch_dims: Any = AUTO,
) -> Tensor:
    """Run the step over one microbatch after another in this process and leave the gradients in the parameters.

    Args:
        model: the model; its gradients are replaced and its buffers updated.
        step: ``step(model, batch)``.
        batch: a whole batch.
        microbatches: how many to cut it into; a batch of fewer samples becomes as many as it has samples.
        seed: the pipeline's seed.
        index: the number of the pipeline's earlier steps.
        scaler: scales each loss; gradients stay scaled.
        batch_dims: the dimensions that hold the samples, as in ``panpipe.pipeline``.

    Returns:
        The loss: the mean over the batch, not scaled.

    Raises:
        RequestError: the batch cannot be cut, or the step returns no tensor.
    """
    return reference_of_replicas(
        model, step, [batch], microbatches=microbatches, seed=seed, index=index, scaler=scaler, batch_dims=batch_dims
    )


def reference_of_replicas(
    model: nn.Module,
    step: StepFunction,
    batches: Sequence[Any],
    *,
    microbatches: int,
    seed: int = 0,
    index: int = 0,
    scaler: GradScaler | None = None,
    batch_dims: Any = AUTO,
) -> Tensor:
    """The same for the batches of several replicas, one after another; each is cut into microbatches separately.

    Microbatch m of replica r draws the random numbers of microbatch r × ``microbatches`` + m. Every replica starts with
    the same buffers, and those that the first one wrote are kept, as in DistributedDataParallel.

    Args:
        batches: one whole batch for each replica. Other arguments, result and errors as in `reference_step`.
    """
    dims = place_samples(batches[0], batch_dims, microbatches)
    cut = [split_batch(batch, microbatches, dims, fewer=True) for batch in batches]
    samples = sum(piece.samples for pieces in cut for piece in pieces)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()] if len(cut) > 1 else []
    kept: list[Tensor] = []
    for parameter in model.parameters():  # zero_grad() of a user's class may take other arguments
        parameter.grad = None
    losses: list[Tensor] = []
    weights: list[Any] = []
    weighted = False
    for replica, pieces in enumerate(cut):
        for m, piece in enumerate(pieces):
            with KeyedRandom(random_key(seed, index, replica * microbatches + m)), without_checkpoints():
                result = step(model, piece.batch)
            loss, weight = loss_and_weight(result)
            if not isinstance(loss, Tensor):
                raise RequestError(f"the step returns {type(loss).__name__} and no tensor: return a scalar loss")
            weighted = weight is not None
            # A weight is a constant factor: no gradient flows through it.
            own = piece.samples / samples if weight is None else weight
            weights.append(own.detach() if isinstance(own, Tensor) else own)
            counted = loss * weights[-1]
            (counted if scaler is None else scaler.scale(counted)).backward()
            losses.append(loss.detach())
        kept = kept or [buffer.clone() for buffer, _ in buffers]
        _restore(buffers)
    _restore([(buffer, value) for (buffer, _), value in zip(buffers, kept, strict=True)])
    total, sum_of_weights = mean_loss(losses, weights, weighted)
    if weighted:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(sum_of_weights)
    return total


def _restore(buffers: Sequence[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
