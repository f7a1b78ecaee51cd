"""The memory that an optimizer keeps for each parameter, and the bytes that its step reads and writes."""

from attrs import frozen

from ..errors import RequestError

FLOAT32 = 4
"""Bytes of a float32."""


@frozen
class Optimizer:
    """An optimizer's memory and traffic.

    Args:
        name: its name on the command line.
        moments: number of state tensors, each as large as the parameters.
        exact: whether the state is float32, with a float32 copy of 16-bit parameters; otherwise everything has the
            parameters' number type, as in ``torch.optim``.
    """

    name: str
    moments: int
    exact: bool = False

    def state_bytes(self, size: int) -> int:
        """Parameter, gradient and state of a parameter of ``size`` bytes per element, in bytes per element."""
        return 2 * size + self._state(size)

    def moved_bytes(self, size: int) -> int:
        """Bytes that a fused step reads and writes for an element of ``size`` bytes."""
        copied = self._has_copy(size)
        state = 2 * self._state(size)
        # The gradient is read; the parameter is written, and also read if there is no float32 copy to read.
        return state + (2 if copied else 3) * size

    def _has_copy(self, size: int) -> bool:
        return self.exact and size < FLOAT32

    def _state(self, size: int) -> int:
        each = max(size, FLOAT32) if self.exact else size
        return self.moments * each + (FLOAT32 if self._has_copy(size) else 0)


OPTIMIZERS = {
    optimizer.name: optimizer
    for optimizer in (
        Optimizer("adam-master", 2, exact=True),  # 16 bytes per parameter: ZeRO, arXiv 1910.02054, section 3.1
        Optimizer("adam", 2),
        Optimizer("sgd", 0),
        Optimizer("sgd-momentum", 1),
    )
}
"""Optimizers by name. ``adam-master`` and ``adam`` are the same for parameters in float32."""

DEFAULT = "adam-master"


def find_optimizer(name: str) -> Optimizer:
    """The optimizer of that name. Raises RequestError if there is none."""
    if name not in OPTIMIZERS:
        raise RequestError(f"there is no optimizer '{name}': use one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]
