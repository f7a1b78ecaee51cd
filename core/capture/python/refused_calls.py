"""Refuses calls that cannot be captured and would end in an internal error of torch, with the reason."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from ..values.capture_errors import Refused
from ..values.code_origin import is_users_own

_COND = (
    "torch.cond chooses by the value of a tensor, and cannot be captured: write `if` within the forward of a "
    "submodule, which then stays Python on one stage, or compute both ways and choose with torch.where"
)
_LOAD = (
    "the step loads a file by torch.load: a captured step would load it only once; load it before training, and "
    "register what it holds as a buffer of the model"
)
_SENDS = (
    "the step communicates with other processes, which a captured step does not do: panpipe sums gradients, and "
    "what the processes share is given with the batch or written to a buffer between steps"
)
_COLLECTIVES = ("broadcast", "all_reduce", "all_gather", "all_gather_into_tensor", "reduce", "send", "recv")
_CALLS = (
    (torch, "cond", _COND), (torch, "load", _LOAD),
    *((torch.distributed, name, _SENDS) for name in _COLLECTIVES if hasattr(torch.distributed, name)),
)  # fmt: skip


@contextmanager
def calls_refused() -> Iterator[None]:
    """A context in which these calls of the user's code raise `Refused`."""

    def refusing(original: Callable[..., Any], reason: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_users_own(sys._getframe(1).f_code.co_filename):
                raise Refused(reason)
            return original(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for module, name, reason in _CALLS:
            stack.enter_context(mock.patch.object(module, name, refusing(getattr(module, name), reason)))
        yield
