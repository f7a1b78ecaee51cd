"""Constructing a model of which only shapes are wanted: its parameters on the meta device, its buffers real."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import UninitializedParameter
from torch.utils.weak import WeakIdKeyDictionary

from .heap import SMALL, keep_freed_memory


@contextmanager
def empty_weights() -> Iterator[None]:
    """Construct modules whose parameters take no memory.

    Each parameter goes to the meta device where it is registered, so that at most one has memory at a time. Buffers
    stay what the constructor computes, such as rotary tables and masks, which no checkpoint holds. Hand the model to
    `panpipe.pipeline`, whose ``weights`` tells where values come from.

    Works for what this thread constructs; a tied weight stays one parameter.

    Example:
        >>> with panpipe.empty_weights():  # doctest: +SKIP
        ...     model = LlamaForCausalLM(config)
    """
    keep_freed_memory(SMALL)  # else the C library keeps the room of every parameter that came and went
    here = threading.get_ident()
    # One parameter under two names is registered twice; what is remembered of it must not keep it alive.
    known: Any = WeakIdKeyDictionary()

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or isinstance(parameter, UninitializedParameter):
            return None  # as it is
        if threading.get_ident() != here:
            return None
        if parameter not in known:
            known[parameter] = _on_meta(parameter)
        found: nn.Parameter = known[parameter]
        return found

    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]  # annotated too narrowly
    try:
        yield
    finally:
        handle.remove()


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    meta = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    meta.__dict__.update(parameter.__dict__)  # marks that libraries leave on parameters
    return meta
