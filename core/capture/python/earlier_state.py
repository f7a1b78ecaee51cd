"""The Python state of a model's modules before a capture: trial runs of the step start from it.

During capture, modules store values for later calls, such as the shapes that they have seen. A trial run that started
with these values would not detect that the first call computes something else.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from .holders import INTERNAL, contents_of, has_entries, number_of_forward_hooks, refill

_State = list[tuple[nn.Module, dict[str, Any], dict[str, Any]]]
"""Modules, their attributes, and copies of the containers among these."""


class EarlierState:
    """The attributes of modules, apart from tensors, as they are now.

    Args:
        model: the user's module.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._state, self._hooks = model, _state(model), number_of_forward_hooks(model)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context in which modules have this state; not if hooks were added, since modules keep flags of that."""
        if number_of_forward_hooks(self._model) != self._hooks:
            yield
            return
        now = _state(self._model)
        _restore(self._state)
        try:
            yield
        finally:
            _restore(now)


def _state(model: nn.Module) -> _State:
    return [
        (module, {key: value for key, value in vars(module).items() if key not in INTERNAL}, contents_of(vars(module)))
        for module in model.modules()
    ]


def _restore(state: _State) -> None:
    for module, values, contents in state:
        own = vars(module)
        for key in [key for key in own if key not in values and key not in INTERNAL]:
            if not isinstance(own[key], Tensor):
                del own[key]
        for key, value in values.items():
            if own.get(key) is not value and not isinstance(value, Tensor) and key not in module._buffers:
                own[key] = value
        for key, value in contents.items():
            if not has_entries(values[key], value):
                refill(values[key], value)
