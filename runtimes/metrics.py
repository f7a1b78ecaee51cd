"""The numbers of the last step, which `Pipeline.metrics` returns."""

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

from attrs import frozen
from torch import Tensor

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


@frozen(eq=False, repr=False)
class Metrics(Mapping[str, float]):
    """The other parts of the last step's result, by name, and how far training is.

    It is of the moment at which ``pipe.metrics`` was read: later steps do not change it, once ``learning_rates`` was
    read. On a GPU reading one of its
    parts, or ``grad_norm``, waits for the step; counting does not. ``dict(pipe.metrics)`` has the parts alone.

    Args:
        parts: of the result of the last batch, trained on or evaluated.
        steps: batches trained on so far, also those before a checkpoint that was resumed.
        updates: optimizer steps so far, without skipped ones.
        skipped: whether the last update was skipped: with a scaler because a gradient of some stage was not finite;
            with ``on_nonfinite="skip"`` or ``"raise"`` because the loss was not, of this batch or of one whose
            gradients waited for the update, or the global norm.
        norm: the global 2-norm of the last update's gradients before clipping, a scalar tensor; None without
            ``clip_norm``.
        rates: the learning rate of each parameter group in the next update. The groups are those of this process's
            first stage with an optimizer, or of all stages if it has none.
    """

    _parts: LazyValue[dict[str, float]]
    steps: int
    updates: int
    skipped: bool
    _norm: Tensor | None
    _rates: LazyValue[list[float]]

    def __getitem__(self, name: str) -> float:
        return self._parts()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts())

    def __len__(self) -> int:
        return len(self._parts())

    @property
    def grad_norm(self) -> float | None:
        """The global 2-norm of the last update's gradients, before clipping; None without ``clip_norm``."""
        return None if self._norm is None else self._norm.item()

    @property
    def learning_rates(self) -> list[float]:
        """The learning rate of each parameter group in the next update, when it is first read."""
        return self._rates()

    def __repr__(self) -> str:
        norm = "" if self._norm is None else f", grad_norm={self.grad_norm:.4g}"
        rates = ", ".join(f"{rate:.4g}" for rate in self.learning_rates)
        parts = "".join(f", {name}={value:.4g}" for name, value in self.items())
        return (
            f"<steps={self.steps}, updates={self.updates}, skipped={self.skipped}{norm}, "
            f"learning_rates=[{rates}]{parts}>"
        )
