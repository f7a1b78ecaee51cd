"""Construction of a model without memory for its parameters: they are on the meta device; buffers are real."""

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

    Each parameter moves to the meta device when it is registered, so that at most one has memory at a time. Buffers
    keep the values that the constructor computes, such as rotary tables and masks, which no checkpoint has. Pass the
    model to `panpipe.pipeline`, whose ``weights=`` is the source of its values.

    It applies to modules that this thread constructs; a tied weight stays one parameter.

    Example:
        >>> with panpipe.empty_weights():  # doctest: +SKIP
        ...     model = LlamaForCausalLM(config)
    """
    keep_freed_memory(SMALL)  # otherwise the C library keeps the memory of every freed parameter
    here = threading.get_ident()
    # A parameter with two names is registered twice; weak keys, because this table must not keep it alive.
    known: Any = WeakIdKeyDictionary()

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or isinstance(parameter, UninitializedParameter):
            return None  # unchanged
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
    meta.__dict__.update(parameter.__dict__)  # attributes that libraries set on parameters
    return meta
