"""One process, untouched eager PyTorch without gradients: what an evaluation has to equal."""

from typing import Any

import torch
from panpipe.core.capture.batch.find_batch_dims import find_batch_dims
from panpipe.core.capture.graph.randomness import KeyedRandom, random_key
from panpipe.runtimes.batch.losses import loss_and_weight, mean_loss
from panpipe.runtimes.microbatches import split_batch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


def microbatch_results(
    model: nn.Module, function: Any, batch: Any, microbatches: int, seed: int = 3, index: int = -1, first: int = 0
) -> list[tuple[Any, int]]:
    """What a function returns for one microbatch after another, and how many samples each has."""
    pieces = split_batch(batch, microbatches, find_batch_dims(model, function, batch), fewer=True)
    found = []
    for m, piece in enumerate(pieces):
        with torch.no_grad(), KeyedRandom(random_key(seed, index, first + m)):
            found.append((function(model, piece.batch), piece.samples))
    return found


def loss_alone(model: nn.Module, step: Any, batch: Any, microbatches: int, index: int = -1) -> Tensor:
    """The mean of a step's loss over a batch."""
    results = microbatch_results(model, step, batch, microbatches, index=index)
    found = [(*loss_and_weight(result), samples) for result, samples in results]
    total = sum(samples for *_, samples in found)
    weights = [samples / total if weight is None else weight for _, weight, samples in found]
    return mean_loss([loss for loss, *_ in found], weights, found[0][1] is not None)[0]


def joined_alone(model: nn.Module, function: Any, batch: Any, microbatches: int) -> Any:
    """What a function returns, joined over microbatches."""
    found = [pytree.tree_flatten(result) for result, _ in microbatch_results(model, function, batch, microbatches)]
    columns = zip(*(leaves for leaves, _ in found), strict=True)
    return pytree.tree_unflatten([None if row[0] is None else torch.cat(row) for row in columns], found[0][1])


def state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, buffers and gradients, of what is in this process."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    found = {f"{name} ": t.detach().clone() for name, t in tensors if not t.is_meta}
    held = ((name, p) for name, p in model.named_parameters() if not p.is_meta)
    return found | {f"{name} gradient": p.grad.clone() for name, p in held if p.grad is not None}
