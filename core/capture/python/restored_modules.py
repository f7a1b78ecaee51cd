"""Restoring the modules of a model after a run with real tensors."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .holders import contents_of, has_entries, refill


@contextmanager
def modules_restored(model: nn.Module) -> Iterator[None]:
    """The context of a run of the model; at its end, attributes, buffers and hooks of its modules are restored.

    All of them together, because a model that registers hooks at its first call also sets a flag, and would register
    them again without it.
    """
    modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    before = [(module, dict(module.__dict__), contents_of(module.__dict__)) for module in modules]
    hooks = [held for module in modules for held in module.__dict__.values() if type(held) is OrderedDict]
    tensors = [held for module in modules for held in (module._buffers, module._parameters)]
    registered: list[tuple[Any, dict[str, Any]]] = [(held, dict(held)) for held in (*tensors, *hooks)]
    try:
        yield
    finally:
        for module, values, contents in before:
            module.__dict__.clear()
            module.__dict__.update(values)
            for key, value in contents.items():
                if not has_entries(values[key], value):
                    refill(values[key], value)
        for held, entries in registered:
            held.clear()
            held.update(entries)
