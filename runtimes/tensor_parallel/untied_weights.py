"""Warns of weights that `parallelize_module` untied: transformers' models with one weight for embedding and head."""

import warnings
from typing import Any

from torch import nn


def warn_of_untied_weights(model: nn.Module) -> None:
    """Warn if the configuration of a model ties the embedding and the head, and they have two weights.

    Args:
        model: the user's, with DTensors.
    """
    for name, module in model.named_modules():
        if not getattr(getattr(module, "config", None), "tie_word_embeddings", False):
            continue
        first, last = (_embeddings(module, method) for method in ("get_input_embeddings", "get_output_embeddings"))
        if first is None or last is None or first is last:
            continue
        warnings.warn(
            f"{name or type(module).__name__} has tie_word_embeddings=True, and embedding and head are two weights, "
            "which would both be trained: parallelize_module unties a weight that two modules share; tie them again "
            "after it (head.weight = embedding.weight), or build the model with tie_word_embeddings=False",
            stacklevel=2,
        )


def _embeddings(module: Any, method: str) -> Any:
    """The weight of the embedding or the head; None if the model has none."""
    found = getattr(module, method)() if hasattr(module, method) else None
    return getattr(found, "weight", None)
