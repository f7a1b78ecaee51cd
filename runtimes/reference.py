"""One process, untouched eager PyTorch, the same microbatches: what a pipeline has to equal."""

from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..core.capture.breaks import StepFunction
from ..core.capture.functions import without_checkpoints
from ..core.capture.randomness import KeyedRandom, random_key
from ..core.errors import RequestError
from .losses import mean_loss
from .microbatches import split_batch


def reference_step(
    model: nn.Module, step: StepFunction, batch: Any, *, microbatches: int, seed: int = 0, index: int = 0
) -> Tensor:
    """Run the step over one microbatch after another in this process and leave the gradients in the parameters.

    Args:
        model: the model; its gradients are replaced and its buffers updated.
        step: ``step(model, batch)``.
        batch: a whole batch.
        microbatches: how many to cut it into; a batch of fewer samples becomes as many as it has samples.
        seed: the pipeline's seed.
        index: how many steps the pipeline had made before.

    Returns:
        The loss: the mean over the batch.

    Raises:
        RequestError: there is nothing to cut, or the step returns no tensor.
    """
    pieces, spec = split_batch(batch, microbatches, fewer=True)
    model.zero_grad(set_to_none=True)
    losses: list[Tensor] = []
    weights: list[Any] = []
    weighted = False
    for m, piece in enumerate(pieces):
        with KeyedRandom(random_key(seed, index, m)), without_checkpoints():
            result = step(model, pytree.tree_unflatten(list(piece.leaves), spec))
        loss, weight = _parts(result)
        if not isinstance(loss, Tensor):
            raise RequestError(f"the step returns {type(loss).__name__} and no tensor: return a scalar loss")
        weighted = weight is not None
        # A weight is how much a loss counts, and no part of it.
        weights.append(weight.detach() if isinstance(weight, Tensor) else piece.weight if weight is None else weight)
        (loss * weights[-1]).backward()
        losses.append(loss.detach())
    total, sum_of_weights = mean_loss(losses, weights, weighted)
    if weighted:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(sum_of_weights)
    return total


def _parts(result: Any) -> tuple[Any, Any]:
    """The loss, and the step's own weight or None."""
    if not isinstance(result, tuple | list):
        return result, None
    parts = [part for part in result if not isinstance(part, dict)]
    return (parts[0], parts[1]) if len(parts) > 1 else (parts[0], None)
