"""One process, untouched eager PyTorch, the same microbatches: what a pipeline has to equal."""

from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..core.capture.randomness import KeyedRandom, random_key
from ..core.capture.step import StepFunction
from ..core.errors import RequestError
from .microbatches import split_batch


def reference_step(
    model: nn.Module, step: StepFunction, batch: Any, *, microbatches: int, seed: int = 0, index: int = 0
) -> Tensor:
    """Run the step over one microbatch after another in this process and leave the gradients in the parameters.

    Args:
        model: the model; its gradients are replaced and its buffers updated.
        step: ``step(model, batch)``.
        batch: a whole batch.
        microbatches: how many to cut it into.
        seed: the pipeline's seed.
        index: how many steps the pipeline had made before.

    Returns:
        The loss: the mean over the batch.
    """
    pieces, spec = split_batch(batch, microbatches)
    model.zero_grad(set_to_none=True)
    total, weights = None, 0.0
    for m, piece in enumerate(pieces):
        with KeyedRandom(random_key(seed, index, m)):
            result = step(model, pytree.tree_unflatten(list(piece.leaves), spec))
        loss, weight = _parts(result, piece.weight)
        (loss * weight).backward()
        weights = weights + weight
        part = loss.detach() * weight
        total = part if total is None else total + part
    if not isinstance(total, Tensor):
        raise RequestError(f"the step returns {type(total).__name__} and no tensor: return a scalar loss")
    if isinstance(weights, Tensor):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(weights)
        total = total / weights
    return total


def _parts(result: Any, share: float) -> tuple[Tensor, Any]:
    if not isinstance(result, tuple | list):
        return result, share
    parts = [part for part in result if not isinstance(part, dict)]
    return (parts[0], parts[1]) if len(parts) > 1 else (parts[0], share)
