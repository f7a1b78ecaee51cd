"""A LightningModule's steps as functions of a module and a microbatch, with what they log as metrics.

A step of a pipeline is captured once, so ``self.log`` within it must not call lightning: the logged tensors are
metrics of the step, and the strategy logs their means over the batch. Values that change between steps, such as
``self.global_step``, are refused: a captured step would keep the first value.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import RequestError

Logged = dict[str, dict[str, Any]]
"""Name → the options of ``self.log``."""

_options: ContextVar[Logged | None] = ContextVar("options of what a step logs", default=None)
_values: ContextVar[dict[str, Tensor] | None] = ContextVar("what a step logs", default=None)


class Unavailable:
    """A value that a captured step cannot read; any use of it raises.

    Args:
        name: the value's name.
        fix: what to use instead.
    """

    _name: str
    _fix: str

    def __init__(self, name: str, fix: str) -> None:
        self.__dict__.update(_name=name, _fix=fix)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise RequestError(
            f"{self._name} is read within a step, which is captured once and keeps its value: {self._fix}"
        )

    __getattr__ = __bool__ = __index__ = __int__ = __float__ = __eq__ = __lt__ = __gt__ = __le__ = __ge__ = _refuse
    __mod__ = __add__ = __radd__ = __sub__ = __mul__ = __rmul__ = __truediv__ = __floordiv__ = __hash__ = _refuse


TRAINER = Unavailable("self.trainer", "pass what changes between steps in the batch, and log after the step")
INDEX = Unavailable("batch_idx", "put the number into the batch")


def _log(name: str, value: Any, **options: Any) -> None:
    """Replaces ``LightningModule.log`` within a step.

    Options are known from the capture; what remains Python runs in a thread of its device, without them.
    """
    values, known = _values.get(), _options.get()
    if values is None:
        raise RequestError(
            f"self.log('{name}') is called in Python that the pipeline runs in each step: log after the step"
        )
    if not isinstance(value, Tensor | int | float):
        raise RequestError(f"self.log('{name}') has a {type(value).__name__}: log a tensor or a number")
    values[name] = torch.as_tensor(value).detach().float().mean()
    if known is not None:
        known[name] = options


def _log_dict(dictionary: Mapping[str, Any], **options: Any) -> None:
    for name, value in dictionary.items():
        _log(name, value, **options)


@contextmanager
def detached(module: nn.Module, logged: Logged) -> Iterator[None]:
    """Detach a module from its trainer within a context, so that its steps can be captured.

    Args:
        module: a LightningModule.
        logged: filled with the options of every logged value.
    """
    own = module.__dict__
    trainer = own["_trainer"]
    own.update(_trainer=TRAINER, log=_log, log_dict=_log_dict)
    token = _options.set(logged)
    try:
        yield
    finally:
        _options.reset(token)
        del own["log"], own["log_dict"]
        own["_trainer"] = trainer


def loss_of(name: str, shared: bool) -> Callable[[Any, Any], Any]:
    """A step for ``panpipe.pipeline``, or for ``evaluate``.

    Args:
        name: name of the method: ``"training_step"``, ``"validation_step"`` or ``"test_step"``.
        shared: whether batches are pairs of a batch and the shares of its rows in it.
    """

    def step(module: Any, batch: Any) -> Any:
        batch, shares = batch if shared else (batch, None)
        token = _values.set({})
        try:
            result = getattr(module, name)(batch, INDEX)
            logged = _values.get() or {}
        finally:
            _values.reset(token)
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if loss is None:
            loss = next(iter(logged.values()), None)
        if loss is None:
            raise RequestError(f"{name} returns no loss and logs nothing: return a loss, or log one")
        return (loss, logged) if shares is None else (loss, shares.sum(), logged)

    return step


def prediction(module: Any, batch: Any) -> Any:
    """``predict_step`` as a function for ``forward``."""
    return module.predict_step(batch, INDEX)
