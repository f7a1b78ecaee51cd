"""The ``grad`` of a parameter, or of its slice in an optimizer, whose accumulated gradient replicas share."""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ...core.errors import RequestError
from ...core.tensor_metadata import METADATA_FUNCTIONS, first_of, name_of

CLEARED = (
    "zero_grad() cleared the gradients that step(batch, update=False) had accumulated, but their batches count in the "
    "mean of the next update: remove the call of zero_grad(); every update clears gradients itself"
)
PARTS = (
    "with shard='gradients' or 'parameters' each replica keeps a part of the sums; use Memory(shard='optimizer') to "
    "read or change gradients between step(batch, update=False) and the update"
)
SLICE = (
    "with shard='optimizer' a slice in an optimizer has no gradient before the update; read or change that of the "
    "parameter in the model"
)
_ZERO = ("zero_", "_foreach_zero_")


class SharedGradient(Tensor):
    """What ``grad`` is between steps if this replica does not have the gradient's values.

    Its shape can be read; any use of its values is refused.

    Attributes:
        parameter_name: the parameter's qualified name.
        why: it has no value.
    """

    parameter_name: str
    why: str

    @classmethod
    def of(cls, parameter: nn.Parameter, name: str, why: str = PARTS) -> "SharedGradient":
        """One with the shape of a parameter, which takes no memory.

        Args:
            parameter: it, or a slice of it.
            name: the parameter's qualified name.
            why: it has no value, and what to do, for messages.
        """
        zero = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        made: SharedGradient = zero.expand(parameter.shape).as_subclass(cls)
        made.parameter_name, made.why = name, why
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in METADATA_FUNCTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        what = name_of(func)
        if what in _ZERO:
            raise RequestError(CLEARED)
        first = first_of(cls, (args, kwargs or {}))
        assert first is not None
        first.refuse(what)

    def refuse(self, what: str) -> NoReturn:
        """Raise an error.

        Args:
            what: what was done with it.

        Raises:
            RequestError: always.
        """
        raise RequestError(
            f"'{what}' of the gradient of '{self.parameter_name}', which waits for an update, would be lost or wrong: "
            f"{self.why}, or use Update(clip_norm=) to clip all of them"
        )

    def __format__(self, specification: str) -> str:
        return format(repr(self), specification)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<gradient of '{self.parameter_name}', shared by replicas>"
