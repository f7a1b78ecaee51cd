"""Assignments of ``requires_grad`` within a step, as in a GAN's step; gradients that a step reads or sets are refused.

A captured graph has no such assignments, because export runs before autograd. Operators that run while a parameter is
frozen give it no gradient, so they read a detached parameter. A step that ends with other settings than those with
which it began is refused: the next microbatch would begin with these.
"""

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ...errors import RequestError
from ..values.user_lines import calling_line, current_line

_GETS: Any = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_SETS: Any = Tensor.requires_grad.__set__  # type: ignore[attr-defined]
_GRAD: Any = Tensor.grad
_GRADIENT = (_GRAD.__get__, _GRAD.__set__, _GRAD.__delete__)


class RequiresGradWrites(TorchFunctionMode):
    """A mode in which a captured step may freeze and unfreeze parameters.

    Args:
        model: the captured model, with captured tensors.
        settings: name of a parameter → whether it requires a gradient when the step begins. Captured tensors may not
            have these settings: they require none for an evaluation.
    """

    def __init__(self, model: nn.Module, settings: Mapping[str, bool]) -> None:
        super().__init__()
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._first = {key: settings[name] for key, name in self._names.items()}
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
        if func == _GETS and (key := id(args[0])) in self._names:
            return self._now.get(key, self._first[key])
        if self._frozen_here:
            args, kwargs = pytree.tree_map_only(Tensor, self._as_frozen, (args, kwargs))
        return func(*args, **kwargs)

    @property
    def _frozen_here(self) -> bool:
        return any(self._first[key] and not trained for key, trained in self._now.items())

    def _set(self, parameter: Tensor, trained: bool) -> None:
        self._now[id(parameter)] = trained
        self._lines[id(parameter)] = calling_line(sys._getframe(1)) or "the step"

    def _refuse_gradient(self, parameter: Tensor) -> None:
        name = self._names[id(parameter)]
        raise RequestError(
            f"{current_line()}the step reads or sets the gradient of parameter '{name}' here, which would "
            "be that of earlier microbatches: a step only returns the loss, and gradients are complete after "
            "pipe.step(batch); leave zero_grad() and backward() out, clip by Update(clip_norm=), and read gradients "
            "between steps"
        )

    def _as_frozen(self, tensor: Tensor) -> Tensor:
        key = id(tensor)
        if self._now.get(key, True) or not self._first[key]:
            return tensor
        if key not in self._detached:
            self._detached[key] = tensor.detach()
        return self._detached[key]

    def check_ends(self) -> None:
        """Compare the settings of the step's end with those of its start.

        Raises:
            RequestError: they differ; the message has the line.
        """
        for key, trained in self._now.items():
            if trained is not self._first[key]:
                ends, began = ("trained", "frozen") if trained else ("frozen", "trained")
                raise RequestError(
                    f"{self._lines[key]}: the step leaves parameter '{self._names[key]}' {ends}, and it began {began}, "
                    "so that the next microbatch computes something else: set requires_grad back before the step "
                    "returns, or set it between steps"
                )
