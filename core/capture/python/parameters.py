"""The parameters and buffers of a captured run, where Python refers to them, and freezes them.

A captured run has other tensors in the modules. ``params = list(model.parameters())`` around a step, an optimizer's
``param_groups``, or ``if p not in no_decay`` would still mean the real ones: their gradients would be missing, and no
tensor would be found. So during a run these values are replaced by copies that have the tensors of the modules.

A captured graph has no assignments of ``requires_grad``, as in a GAN's step, because export runs before autograd.
Operators that run while a parameter is frozen give it no gradient, so they read a detached parameter. A step that ends
with other settings than those with which it began is refused: the next microbatch would begin with these. So are
gradients that a step reads or sets.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ...errors import RequestError
from ..values.user_lines import calling_line, current_line
from .guards import Guards
from .named import is_small_container


@contextmanager
def references_followed(model: nn.Module, guards: Guards) -> Iterator[None]:
    """The context of a run in which the modules of a model have other tensors.

    Args:
        model: with these tensors.
        guards: the values that the step's code names, when the model had its own tensors.
    """
    tensors = *model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)
    now = dict(tensors)
    others = {key: now[name] for key, name in guards.tensors.items() if name in now and id(now[name]) != key}
    replaced = []
    for named in guards.found.named.values() if others else ():
        if named.now() is named.value and (other := _with(named.value, others)) is not named.value:
            named.assign(other)
            replaced.append((named, other))
    try:
        yield
    finally:
        for named, other in replaced:
            if named.now() is other:
                named.assign(named.value)


def _with(value: Any, others: Mapping[int, Tensor], depth: int = 4) -> Any:
    """A value with other tensors in place of the model's; the value itself if it has none of them."""
    kind = type(value)
    if issubclass(kind, Tensor):
        return others.get(id(value), value)
    if kind is int:
        return id(others[value]) if value in others else value  # ``id(p) in exempt``
    if kind not in (list, tuple, set, frozenset, dict) or not depth or not is_small_container(value):
        return value
    parts = list(value.items()) if kind is dict else list(value)
    new = [_with(part, others, depth - (kind is not dict)) for part in parts]
    if all(one is other for one, other in zip(parts, new, strict=True)):
        return value
    return kind(new)


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
