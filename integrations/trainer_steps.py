"""The loss and the outputs of a microbatch, as transformers' Trainer computes those of a batch.

Trainer divides a sum of losses by the number of items in all batches of an update. If a microbatch did so too, the mean
over microbatches would be too small; if it returned its own mean, Trainer's sum over batches would be too large. So a
microbatch returns its mean, with its number of items as the weight.

A ``compute_loss`` or ``compute_loss_func`` of the user may divide a sum by ``num_items_in_batch``, or return a mean
over rows, over labels, or over labels without the first of each row. A trial shows which one it is: the loss of a
batch must be the weighted mean of the losses of its parts.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor, nn

from ..core.errors import RequestError

IGNORED = -100
"""The label of tokens and rows without a loss."""

SHARE = "panpipe_share_of_batch"
"""The name of an input with each row's share of its batch."""


@frozen
class BatchCount:
    """How Trainer counts the items of a batch (``Trainer._get_num_items_in_batch``).

    Args:
        used: whether the model's loss is divided by the count.
        shifts: whether the loss omits the first label of each row.
    """

    used: bool
    shifts: bool

    def counts(self, inputs: Any) -> bool:
        """Whether items are counted, and not samples."""
        return self.used and isinstance(inputs.get("shift_labels", inputs.get("labels")), Tensor)

    def __call__(self, inputs: Any) -> Tensor:
        """The number of items with a loss, a scalar tensor."""
        labels = inputs.get("shift_labels")
        if labels is None:
            labels = inputs["labels"][..., 1:] if self.shifts else inputs["labels"]
        counted: Tensor = labels.ne(IGNORED).sum()
        return counted


def loss_step(trainer: Any, count: BatchCount, dtype: torch.dtype | None) -> Callable[[Any, Any], Any]:
    """The step for ``panpipe.pipeline``."""
    from transformers import Trainer

    own = type(trainer).compute_loss is not Trainer.compute_loss
    loss_of = trainer.compute_loss if own else _model_loss(trainer)

    def step(model: Any, batch: Any) -> Any:
        inputs = dict(batch)
        share = inputs.pop(SHARE, None)
        counted = count.counts(inputs)
        items = count(inputs) if counted else None
        with _autocast(dtype, model):
            # A microbatch without items has a sum of 0, which a count of 0 would turn into NaN.
            loss = loss_of(model, inputs, num_items_in_batch=None if items is None else items.clamp(min=1))
        if items is not None:
            return loss, items
        return loss if share is None else (loss, share.sum())

    return step


def _model_loss(trainer: Any) -> Callable[..., Tensor]:
    """``Trainer.compute_loss`` as a function that reads nothing of the trainer that changes between steps."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    accepts, smoother, given = trainer.model_accepts_loss_kwargs, trainer.label_smoother, trainer.compute_loss_func
    names = {type(module).__name__ for module in trainer.model.modules()}
    shifts = {"shift_labels": True} if names & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()) else {}

    def loss(model: Any, inputs: dict[str, Any], num_items_in_batch: Tensor | None) -> Tensor:
        labels = inputs.pop("labels", None) if smoother is not None or given is not None else None
        if accepts and num_items_in_batch is not None:
            inputs["num_items_in_batch"] = num_items_in_batch
        outputs = model(**inputs)
        if given is not None:
            return given(outputs, labels, num_items_in_batch=num_items_in_batch)  # type: ignore[no-any-return]
        if labels is not None:
            return smoother(outputs, labels, **shifts, num_items_in_batch=num_items_in_batch)  # type: ignore[no-any-return]
        return outputs["loss"] if isinstance(outputs, dict) else outputs[0]  # type: ignore[no-any-return]

    return loss


@frozen
class Outputs:
    """The outputs of a model without some of them."""

    ignored: tuple[str, ...]
    dtype: torch.dtype | None

    def of_microbatch(self, model: Any, inputs: Any) -> tuple[Any, ...]:
        """The outputs, each with a row for each sample."""
        with _autocast(self.dtype, model):
            outputs = model(**inputs)
        if isinstance(outputs, dict):
            return tuple(value for key, value in outputs.items() if key not in self.ignored)
        return tuple(outputs[1:])


def _autocast(dtype: torch.dtype | None, model: Any) -> AbstractContextManager[Any]:
    if dtype is None:
        return nullcontext()
    return torch.autocast(next(model.parameters()).device.type, dtype)


Step = Callable[[Any, Any], Any]
_LEAST_LABELS = 4
"""The trial ignores some labels of rows with at least this many."""


def step_of_trainer(trainer: Any, count: BatchCount, dtype: torch.dtype | None, inputs: Any) -> Step:
    """The step for ``panpipe.pipeline``, with weights of microbatches that are right for the trainer's loss.

    Args:
        inputs: a batch for the trial of the trainer's own loss.

    Raises:
        RequestError: the loss of a batch is no weighted mean of those of its parts, or Trainer would add up the means
            of batches.
    """
    if not _has_own_loss(trainer):
        return loss_step(trainer, count, dtype)
    if trainer.args.gradient_accumulation_steps > 1 and count.counts(inputs) and _ignores_items(trainer, inputs):
        raise RequestError(
            "compute_loss ignores num_items_in_batch, and Trainer then adds up the means of the "
            f"{trainer.args.gradient_accumulation_steps} batches of an update: divide a sum by num_items_in_batch, or "
            "set trainer.model_accepts_loss_kwargs = False"
        )
    counts = (count, evolve(count, shifts=not count.shifts), evolve(count, used=False))
    errors = [_weight_error(loss_step(trainer, each, None), trainer.model, inputs) for each in counts[:-1]]
    with suppress(Exception):  # a loss that divides by the number of items needs one
        errors.append(_weight_error(loss_step(trainer, counts[-1], None), trainer.model, inputs))
    # The first right count is used. A loss that divides by the given number of items is a weighted mean with any count,
    # but only right with Trainer's own count, which is therefore first.
    found = next(
        (each for each, error in zip(counts, errors, strict=False) if error <= _tolerance(trainer.model)), None
    )
    if found is not None:
        return loss_step(trainer, found, dtype)
    raise RequestError(
        "the loss of a batch is not the mean of those of its parts by rows or by labels, so microbatches would train "
        "differently from the batch: let compute_loss divide a sum by num_items_in_batch, or return a mean over rows"
    )


def _has_own_loss(trainer: Any) -> bool:
    from transformers import Trainer

    return trainer.compute_loss_func is not None or type(trainer).compute_loss is not Trainer.compute_loss


def _ignores_items(trainer: Any, inputs: Any) -> bool:
    """Whether the loss is the same for another number of items."""
    one, two = torch.tensor(8), torch.tensor(16)
    batch = _on_device_of(trainer.model, inputs)
    with _without_side_effects(trainer.model):
        first, second = (
            trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=items) for items in (one, two)
        )
    return torch.equal(first, second)


def _tolerance(model: nn.Module) -> float:
    """The largest error of a weight that counts as rounding."""
    return 0.1 if next(model.parameters()).element_size() < 4 else 0.01


def _weight_error(step: Step, model: nn.Module, inputs: Any) -> float:
    """Error of the weight that the first half of the rows has in the loss of a batch; 0 if it cannot be tried."""
    batch = _on_device_of(model, inputs)
    rows = next((len(value) for value in batch.values() if isinstance(value, Tensor) and value.ndim), 1)
    for trial in (_unequal(batch, rows // 2), batch) if rows > 1 else ():
        parts = [_rows(trial, rows, slice(0, rows // 2)), _rows(trial, rows, slice(rows // 2, rows))]
        with _without_side_effects(model):
            (whole, _), (first, one), (second, two) = (_weighted(step(model, part), part) for part in (trial, *parts))
        error = float((whole - (first * one + second * two) / (one + two)).abs())
        if math.isfinite(error):
            return error / max(float((first - second).abs()), 1e-4 * float(whole.abs()), 1e-12)
    return 0.0


def _weighted(result: Any, part: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Loss and weight; by rows if the step has no weight."""
    loss, weight = result if isinstance(result, tuple) else (result, None)
    if weight is None:
        weight = torch.tensor(next(len(value) for value in part.values() if isinstance(value, Tensor) and value.ndim))
    return loss.double(), weight.double().to(loss.device)


def _unequal(batch: dict[str, Any], count: int) -> dict[str, Any]:
    """The batch with two labels, the first and the last, in each of the first rows, so that the weights differ.

    Some label of the batch is put there: rows may ignore these two, such as prompts and padding.
    """
    labels = batch.get("labels")
    if (
        not isinstance(labels, Tensor)
        or labels.is_floating_point()
        or labels.ndim < 2
        or len(labels[0]) < _LEAST_LABELS
    ):
        return batch
    known = labels[labels != IGNORED]
    if not len(known):
        return batch
    labels = labels.clone()
    labels[:count] = IGNORED
    labels[:count, [0, -1]] = known[0]
    return {**batch, "labels": labels}


def _rows(batch: dict[str, Any], rows: int, which: slice) -> dict[str, Any]:
    return {
        name: value[which] if isinstance(value, Tensor) and value.ndim and len(value) == rows else value
        for name, value in batch.items()
    }


def _on_device_of(model: nn.Module, inputs: Any) -> dict[str, Any]:
    """The batch on the model's device."""
    device = next(model.parameters()).device
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}


@contextmanager
def _without_side_effects(model: nn.Module) -> Iterator[None]:
    """A context without gradients, dropout and changes of random numbers."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng():
            yield
    finally:
        for module, training in modes:
            module.training = training
