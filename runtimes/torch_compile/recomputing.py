"""Activation checkpoints inside a graph: the recomputation draws the same random numbers as the forward.

Dynamo represents ``torch.utils.checkpoint`` in the graph by a higher-order operator. Unchanged, it would recompute its
body outside of the mode that keys random numbers, and dropout would drop other elements than in the forward.
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
"""Dynamo's operator, which `checkpointed` replaces."""

_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def checkpointed(body: fx.GraphModule, *arguments: Any, **options: Any) -> Any:
    """Run a body whose saved tensors are recomputed in the backward.

    Args:
        body: the graph of the checkpointed function.
        arguments: of the body.
        options: of ``torch.utils.checkpoint.checkpoint``. It does not save generator states: random numbers are keyed.
    """
    modes = _get_current_dispatch_mode_stack()
    drawing = next((mode for mode in reversed(modes) if isinstance(mode, KeyedRandom)), None)
    key, first = (drawing.key, drawing.ordinal) if drawing is not None else (None, 0)
    # Selective checkpointing chooses with these contexts what is saved.
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
