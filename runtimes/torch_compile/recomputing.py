"""Activation checkpoints inside a graph: what a backward computes again draws the numbers that its forward drew.

Dynamo leaves ``torch.utils.checkpoint`` in the graph as an operator of its own. Run as it is, it computes its body
again outside of the mode that keys random numbers, and dropout would drop other elements than in the forward.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from ...core.capture.graph.randomness import KeyedRandom

CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
"""Dynamo's operator, which `checkpointed` takes the place of."""

_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def checkpointed(body: fx.GraphModule, *arguments: Any, **options: Any) -> Any:
    """Run a body whose saved tensors are computed again in the backward.

    Args:
        body: the graph of the function that is checkpointed.
        arguments: its own.
        options: of ``torch.utils.checkpoint.checkpoint``; its generators are left alone, as numbers are keyed.
    """
    modes = _get_current_dispatch_mode_stack()
    drawing = next((mode for mode in reversed(modes) if isinstance(mode, KeyedRandom)), None)
    key, first = (drawing.key, drawing.ordinal) if drawing is not None else (None, 0)
    # Selective checkpointing says by these what is kept.
    chosen: Callable[[], _Contexts] | None = body.meta.get("_checkpoint_context_fn")

    @contextmanager
    def again(selected: AbstractContextManager[Any]) -> Iterator[None]:
        with selected, nullcontext() if key is None else KeyedRandom(key, first):
            yield

    def contexts() -> _Contexts:
        forward, recomputed = chosen() if chosen is not None else (nullcontext(), nullcontext())
        return forward, again(recomputed)

    options |= {"use_reentrant": False, "preserve_rng_state": False, "context_fn": contexts}
    return checkpoint(body, *arguments, **options)
