"""Compares a pipeline with one process: both train on the same batches, and the largest differences are returned.

The reference is plain eager PyTorch in one process, on the same microbatches.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import evolve, field, frozen
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from ...core.arguments import whole_number
from ...core.capture.batch.batch_dims import AUTO, place_samples
from ...core.capture.graph.autograd_functions import without_checkpoints
from ...core.capture.graph.randomness import KeyedRandom, random_key
from ...core.capture.regions.breaks import StepFunction
from ...core.capture.values.containers import flatten_batch
from ...core.errors import RequestError
from ...core.plain_data import exchanged
from ..batch.losses import loss_and_weight, mean_loss
from ..launch.team import Team
from ..microbatches import split_batch
from ..pipeline import Pipeline
from ..update.optimizers import OptimizerFactory

SMALLEST_SHARE, SMALLEST_SHARE_SINGLE = 1e-5, 1e-4
"""The least norm that a gradient's distance is divided by, as a share of the norm of all gradients: in float64, and in
less precise dtypes. Some gradients, such as that of a bias before a normalisation, are zero except for rounding: sums
of terms that cancel. Their rounding error is that of the terms, which are as large as other gradients. With the
tolerances of `panpipe doctor` this allows 45 roundings of the norm of all gradients in float64, and a hundredth of one
in float32."""


@exchanged
@frozen
class Distance:
    """The largest distances between a pipeline and one process.

    Args:
        loss: of any step, absolute.
        gradient: of any parameter's gradient in any step, in norm, relative to that gradient's.
        parameter: of any element of a parameter after the last step, absolute.
        buffer: the same for buffers.
        undefined: number of losses and elements of gradients that are not finite in one process. They must be the same
            in the pipeline; otherwise distances are infinite.
        worst: the name with the largest distance, by kind: ``"gradient"`` → a parameter's name.
    """

    loss: float = 0.0
    gradient: float = 0.0
    parameter: float = 0.0
    buffer: float = 0.0
    undefined: int = 0
    worst: Mapping[str, str] = field(factory=dict)

    def with_distance(self, kind: str, found: float, name: str) -> "Distance":
        """This distance, with the maximum of its value and another one for one kind."""
        found = math.inf if math.isnan(found) else found
        if found <= getattr(self, kind) and not (kind not in self.worst and found == 0):
            return self
        return evolve(self, **{kind: max(found, getattr(self, kind))}, worst={**self.worst, kind: name})

    def with_undefined(self, wanted: Tensor) -> "Distance":
        """This distance, with the elements of a tensor of one process that are not finite."""
        return evolve(self, undefined=self.undefined + int((~wanted.detach().isfinite()).sum()))

    def within(self, tolerance: float, gradients: float) -> bool:
        """Whether all is finite, and within one tolerance; gradients within another."""
        return (
            self.undefined == 0
            and max(self.loss, self.parameter, self.buffer) <= tolerance
            and self.gradient <= gradients
        )


def distance_to_one_process(
    pipe: Pipeline,
    team: Team,
    model: nn.Module,
    step: StepFunction,
    batch: Any,
    optimizer: OptimizerFactory,
    *,
    microbatches: int,
    seed: int = 0,
    steps: int = 3,
    batch_dims: Any = AUTO,
) -> Distance:
    """Train a pipeline and an eager model, and compare.

    The second batch has one more row in each microbatch, if the step accepts that, and an evaluation follows the first
    step. So a step that computes something else when it runs again, or with other sizes, is found.

    Args:
        pipe: a pipeline that has not stepped.
        team: its devices. Each process compares what it owns, and all of them get the largest distances.
        model: a copy of the pipeline's model from before; it is trained.
        batch_dims: the user's, by which the eager model's batches are cut.
    """
    alone = optimizer(list(model.named_parameters()))
    found = Distance()
    batches = [batch, _larger(model, step, batch, batch_dims, microbatches), batch]
    with torch.no_grad():
        evaluates = _runs(model, step, batch, training=False)  # not a step that differentiates
    for index in range(steps):
        if index == 1 and evaluates:
            _evaluate(pipe, batch)
        given = batches[index % len(batches)]
        loss = pipe.step(given)
        wanted = reference_step(
            model, step, given, microbatches=microbatches, seed=seed, index=index, batch_dims=batch_dims
        )
        found = found.with_distance("loss", _largest(loss.detach(), wanted.detach()), f"step {index}").with_undefined(
            wanted
        )
        found = with_gradients(found, pipe._session.model, model)
        if alone is not None:
            alone.step()
    for kind, mine, theirs in (
        ("parameter", dict(pipe._session.model.named_parameters()), dict(model.named_parameters())),
        ("buffer", dict(pipe._session.model.named_buffers()), dict(model.named_buffers())),
    ):
        for name, tensor in theirs.items():
            if not mine[name].is_meta and tensor.numel():
                found = found.with_distance(kind, _largest(mine[name], tensor), name)
    everyone = team.everywhere(lambda _: found)
    for other in everyone:
        for kind in ("loss", "gradient", "parameter", "buffer"):
            found = found.with_distance(kind, getattr(other, kind), other.worst.get(kind, ""))
    return evolve(found, undefined=max(other.undefined for other in everyone))


def _larger(model: nn.Module, step: StepFunction, batch: Any, batch_dims: Any, microbatches: int) -> Any:
    """A batch with one more row in each microbatch, or the same one if the step does not accept that."""
    dims = place_samples(batch, batch_dims, microbatches)
    leaves, nesting = flatten_batch(batch)
    more = []
    for name, leaf in zip(nesting.names, leaves, strict=True):
        dim = dims.by_name.get(name)
        few = dim is not None and leaf.shape[dim] < microbatches
        if few or dims.in_list(name):
            return batch
        more.append(leaf if dim is None else torch.cat([leaf, leaf.narrow(dim, 0, microbatches)], dim))
    larger = nesting.batch(more)
    # All steps in order: a buffer such as a queue may accept the first of other sizes and not the next ones.
    pieces = [piece.batch for each in (batch, larger, batch) for piece in split_batch(each, microbatches, dims)]
    return larger if _runs(model, step, *pieces) else batch


def _runs(model: nn.Module, step: StepFunction, *batches: Any, training: bool = True) -> bool:
    """Whether the step runs on batches in turn, with a copy of the model in training or in evaluation mode."""
    try:
        alone = copy.deepcopy(model)
        for batch in batches:
            step(alone if training else alone.eval(), batch)
    except Exception:  # the step's own, or a model that cannot be copied
        return False
    return True


def _evaluate(pipe: Pipeline, batch: Any) -> None:
    """Evaluate in between, which must change nothing."""
    modes = [(module, module.training) for module in pipe._session.model.modules()]
    pipe._session.model.eval()
    pipe.evaluate(batch)
    for module, training in modes:
        module.training = training


def with_gradients(found: Distance, mine: nn.Module, theirs: nn.Module) -> Distance:
    """A distance, with those of the gradients of a pipeline's model to those of one process."""
    own = dict(mine.named_parameters())
    gradients = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    sizes = {n: g.masked_fill(~g.isfinite(), 0.0).norm().item() for n, g in gradients.items()}
    total = math.hypot(*sizes.values())
    for name, parameter in theirs.named_parameters():
        if own[name].is_meta:
            continue
        here, there = own[name].grad, parameter.grad
        if (here is None) != (there is None):
            found = found.with_distance("gradient", math.inf, name)
        elif here is not None and there is not None:
            same = (here == there) | (here.isnan() & there.isnan())
            apart = (here - there).masked_fill(same, 0.0).norm().item()
            share = SMALLEST_SHARE if torch.finfo(there.dtype).eps < 1e-12 else SMALLEST_SHARE_SINGLE
            size = max(sizes[name], share * total)
            far = 0.0 if apart == 0 else apart / size if size else math.inf
            found = found.with_distance("gradient", far, name).with_undefined(there)
    return found


def _largest(mine: Tensor, theirs: Tensor) -> float:
    if not (mine.is_floating_point() or mine.is_complex()):
        return float((mine != theirs).any())
    same = (mine == theirs) | (mine.isnan() & theirs.isnan())
    return float((mine - theirs).detach().abs().masked_fill(same, 0.0).max().item())


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
        microbatches: how many to cut it into; a batch of fewer samples becomes as many as it has samples.
        index: the number of the pipeline's earlier steps.
        batch_dims: the dimensions that hold the samples, as in ``panpipe.pipeline``.

    Returns:
        The loss: the mean over the batch, not scaled.

    Raises:
        RequestError: the batch cannot be cut, or the step returns no tensor.
    """
    microbatches = whole_number("microbatches", microbatches, 1)
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
