"""The loss and the outputs of a microbatch, as transformers' Trainer computes those of a batch.

Trainer divides a sum of losses by the number of items in all batches of an update. If a microbatch did so too, the mean
over microbatches would be too small; if it returned its own mean, Trainer's sum over batches would be too large. So a
microbatch returns its mean, with its number of items as the weight.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

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
