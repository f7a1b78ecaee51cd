"""Assignments of ``requires_grad`` within a step, as in a GAN's step; gradients that a step reads or sets are refused.

A captured graph has no such assignments, because export runs before autograd. Operators that run while a parameter is
frozen give it no gradient, so they read a detached parameter. Autograd also drops gradients of parameters that are
frozen when the backward runs, so a step must end with the settings with which it began.
"""

import sys
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ...errors import RequestError
from ..values.code_origin import is_users_own

_GETS: Any = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_SETS: Any = Tensor.requires_grad.__set__  # type: ignore[attr-defined]
_GRAD: Any = Tensor.grad
_GRADIENT = (_GRAD.__get__, _GRAD.__set__, _GRAD.__delete__)


class Toggles(TorchFunctionMode):
    """A mode in which a captured step may freeze and unfreeze parameters.

    Args:
        model: the captured model, with captured tensors.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._first: dict[int, bool] = {}
        self._now: dict[int, bool] = {}
        self._lines: dict[int, str] = {}
        self._detached: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _GRADIENT and id(args[0]) in self._names:
            self._refuse_gradient(args[0])
        if (func == _SETS or func is Tensor.requires_grad_) and id(args[0]) in self._names:
            wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
            self._set(args[0], bool(wanted))
            return args[0]
        if func == _GETS and id(args[0]) in self._now:
            return self._now[id(args[0])]
        if self._frozen_here:
            args, kwargs = pytree.tree_map_only(Tensor, self._as_frozen, (args, kwargs))
        return func(*args, **kwargs)

    @property
    def _frozen_here(self) -> bool:
        return any(self._first[key] and not trained for key, trained in self._now.items())

    def _set(self, parameter: Tensor, trained: bool) -> None:
        key = id(parameter)
        if key not in self._first:
            self._first[key] = bool(parameter.requires_grad)
        self._now[key] = trained
        self._lines[key] = _users_line()

    def _refuse_gradient(self, parameter: Tensor) -> None:
        name = self._names[id(parameter)].removeprefix("model.")
        raise RequestError(
            f"{_users_line()}: the step reads or sets the gradient of parameter '{name}' here, which would "
            "be that of earlier microbatches: a step only returns the loss, and gradients are complete after "
            "pipe.step(batch); leave zero_grad() and backward() out, clip by clip_norm=, and read gradients between "
            "steps"
        )

    def _as_frozen(self, tensor: Tensor) -> Tensor:
        key = id(tensor)
        if self._now.get(key, True) or not self._first[key]:
            return tensor
        if key not in self._detached:
            self._detached[key] = tensor.detach()
        return self._detached[key]

    def refuse_unequal_ends(self) -> None:
        """Refuse a step after which a parameter is frozen that was not, or the reverse.

        Raises:
            RequestError: there is one; the message has the line that set it last.
        """
        for key, trained in self._now.items():
            if trained is not self._first[key]:
                words = ("frozen", "trained")[:: -1 if trained else 1]
                raise RequestError(
                    f"{self._lines[key]}: the step leaves parameter '{self._names[key].removeprefix('model.')}' "
                    f"{words[0]}, and it began {words[1]}: set requires_grad back before the step returns, or set it "
                    "between steps"
                )


def _users_line() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_users_own(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
