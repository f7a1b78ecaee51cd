"""A value that is computed when it is first read: on CUDA the host waits for the device then, and not before."""

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class LazyValue(Generic[T]):
    """A value of a step; calling it returns it.

    Args:
        compute: computes the value, once; it is freed then.
    """

    __slots__ = ("_compute", "_value")

    def __init__(self, compute: Callable[[], T]) -> None:
        self._compute: Callable[[], T] | None = compute
        self._value: T

    def __call__(self) -> T:
        if self._compute is not None:
            self._value, self._compute = self._compute(), None
        return self._value
