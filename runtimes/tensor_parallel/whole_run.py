"""Runs a step of a model with DTensors as in one process: with whole parameters, without torch's layouts.

The shapes of the whole are those of this run, call by call: a shape of the part alone does not show whether one head of
a rank is a dimension that is divided.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ...core.capture.values.nesting import tensors_of

Shape = tuple[int, ...]
_TORCH = "torch.distributed.tensor"
_COPY = torch.ops.aten.clone.default
_VIEWS = frozenset({torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default})


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


class CallNumbers(TorchFunctionMode):
    """Numbers the calls of torch's functions by the user's code that return tensors.

    Attributes:
        number: of the call that runs now.
        operators: number of operators that it has run.
        paused: whether calls are not counted: those of torch's own layouts, which one process does not make.
    """

    def __init__(self) -> None:
        super().__init__()
        self.number = self.operators = 0
        self.paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.paused and tensors_of(result):
            self.number += 1
            self.operators = 0
        return result

    def next_operator(self) -> tuple[int, int]:
        """The place of an operator: the call, and its number in the call, without copies."""
        self.operators += 1
        return self.number, self.operators


class NumberedOperators(TorchDispatchMode):
    """A mode that knows the place of each operator (`CallNumbers`)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = CallNumbers()

    def __enter__(self) -> Self:
        self._calls.__enter__()  # type: ignore[no-untyped-call]
        return super().__enter__()  # type: ignore[no-any-return,no-untyped-call]

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)  # type: ignore[no-untyped-call]
        self._calls.__exit__(*failure)  # type: ignore[no-untyped-call]


class WholeCalls(NumberedOperators):
    """Records the shapes of a step of one process.

    Attributes:
        found: place of an operator → the operator, and the shapes of its results.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[tuple[int, int], tuple[Any, list[Shape]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = tensors_of(result)
        if made and func is not _COPY:
            self.found[self._calls.next_operator()] = func, [tuple(tensor.shape) for tensor in made]
        return result
