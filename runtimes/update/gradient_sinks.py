"""Where backward programs put the gradients of parameters: in ``grad``, or in the slots of `shards`."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ...core.capture.programs.accumulated_products import accumulate_product, first_product
from ...core.capture.regions.regions import is_no_gradient


class GradientSink:
    """The sink of a backward program, which adds gradients at their places.

    Args:
        parameters: whose gradients it gets, by number.
        place: parameter → the place of its gradient, and whether it has a value already. It has one then.
        done: called with a parameter when its gradient is computed, or known to be missing.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        place: Callable[[nn.Parameter], tuple[Tensor, bool]],
        begin: Callable[[Sequence[nn.Parameter]], None] = lambda _: None,
        done: Callable[[nn.Parameter], None] = lambda _: None,
    ) -> None:
        self._parameters, self._place, self._begin, self._done = parameters, place, begin, done

    @classmethod
    def discarding(cls, parameters: Sequence[nn.Parameter]) -> "GradientSink":
        """A sink that runs the same operators and keeps nothing."""
        return cls(parameters, lambda p: (torch.zeros(p.shape, dtype=p.dtype, device=p.device), True))

    def begin(self) -> None:
        """The program begins."""
        self._begin(self._parameters)

    def add(self, number: int, gradient: Tensor) -> None:
        """Add to the gradient of a parameter."""
        parameter = self._parameters[number]
        if not is_no_gradient(gradient):
            place, known = self._place(parameter)
            (place.add_ if known else place.copy_)(gradient)
        self._done(parameter)

    def add_product(self, number: int, left: Tensor, right: Tensor) -> None:
        """Add a product of two matrices to the gradient of a parameter, in one operator."""
        parameter = self._parameters[number]
        place, known = self._place(parameter)
        (accumulate_product if known else first_product)(place, left, right)
        self._done(parameter)

    def totals(self, numbers: Sequence[int]) -> list[Tensor]:
        """The places of gradients, to be added to; zeros in those without a value."""
        places = (self._place(self._parameters[number]) for number in numbers)
        return [place if known else place.zero_() for place, known in places]

    def added(self, numbers: Sequence[int]) -> None:
        """They have been added to."""
        for number in numbers:
            self._done(self._parameters[number])
