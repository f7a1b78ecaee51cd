"""What an optimizer keeps for each parameter, and what its step moves."""

from attrs import frozen

from ...errors import RequestError

FLOAT32 = 4
"""Bytes of a float32."""


@frozen
class Optimizer:
    """An optimizer's needs.

    Args:
        name: on the command line.
        moments: tensors of state, each as large as the parameters.
        exact: state in float32 and, of parameters in 16 bits, a float32 copy beside it; else everything has the
            parameters' number type, as in ``torch.optim``.
    """

    name: str
    moments: int
    exact: bool = False

    def state_bytes(self, size: int) -> int:
        """Parameter, gradient and state of a parameter of ``size`` bytes per element, in bytes per element."""
        return 2 * size + self._state(size)

    def moved_bytes(self, size: int) -> int:
        """What a fused step reads and writes, in bytes per element of ``size`` bytes."""
        copied = self._has_copy(size)
        state = 2 * self._state(size)
        # The gradient is read; the parameter is written, and read where no copy stands for it.
        return state + (2 if copied else 3) * size

    def _has_copy(self, size: int) -> bool:
        return self.exact and size < FLOAT32

    def _state(self, size: int) -> int:
        each = max(size, FLOAT32) if self.exact else size
        return self.moments * each + (FLOAT32 if self._has_copy(size) else 0)


OPTIMIZERS = {
    optimizer.name: optimizer
    for optimizer in (
        Optimizer("adam-master", 2, exact=True),  # 16 bytes a parameter: ZeRO, arXiv 1910.02054, section 3.1
        Optimizer("adam", 2),
        Optimizer("sgd", 0),
        Optimizer("sgd-momentum", 1),
    )
}
"""Optimizers by name. ``adam-master`` and ``adam`` are the same for parameters in float32."""

DEFAULT = "adam-master"


def find_optimizer(name: str) -> Optimizer:
    """The optimizer of that name. Raises RequestError where there is none."""
    if name not in OPTIMIZERS:
        raise RequestError(f"there is no optimizer '{name}': use one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]
