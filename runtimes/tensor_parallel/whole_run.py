"""Runs a step of a model with DTensors as in one process: with whole parameters, without torch's layouts."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

_TORCH = "torch.distributed.tensor"


@contextmanager
def without_layouts(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """A context in which a model computes with plain tensors, without the hooks of ``parallelize_module``.

    Args:
        model: the user's.
        values: whole parameters and buffers, by name.
    """
    removed: list[tuple[Any, dict[int, Any]]] = []
    try:
        for module in model.modules():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                before = dict(hooks)
                ours = [key for key, hook in before.items() if _of_torch(hook)]
                if ours:
                    removed.append((hooks, before))
                for key in ours:
                    del hooks[key]
        with _reparametrize_module(model, dict(values)):
            yield
    finally:
        for hooks, before in removed:
            hooks.clear()
            hooks.update(before)


def _of_torch(hook: Any) -> bool:
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith(_TORCH)
