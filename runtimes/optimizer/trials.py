"""Small random parameters and gradients with which the user's optimizer is tried before training."""

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

Shape = tuple[tuple[int, ...], torch.dtype]
"""The shape and dtype of a parameter of a trial."""
STEPS = 3
"""Steps of a trial: the state of an optimizer changes its later updates."""


class TrialParameters:
    """Random parameters, and random gradients of them.

    The numbers of a parameter depend on its name and shape alone, so that trials with other parameters draw the same.

    Args:
        shapes: by name.

    Attributes:
        parameters: by name.
    """

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self._shapes = shapes
        self._generators = {name: torch.Generator().manual_seed(zlib.crc32(name.encode())) for name in shapes}
        self.parameters = {name: nn.Parameter(self.draw(name)) for name in shapes}

    def draw(self, name: str) -> Tensor:
        """The next random tensor with the shape of a parameter."""
        shape, dtype = self._shapes[name]
        return torch.randn(shape, dtype=dtype, generator=self._generators[name])


def trial_shapes(parameters: Mapping[str, nn.Parameter], largest: int) -> dict[str, Shape]:
    """Small shapes of the same numbers of dimensions, in float64 or complex128.

    Args:
        parameters: by name; on meta or not.
        largest: size of a dimension.
    """
    return {
        name: (
            tuple(min(size, largest) for size in p.shape),
            torch.complex128 if p.dtype.is_complex else torch.float64,
        )
        for name, p in parameters.items()
    }


def spread(names: Sequence[str], most: int) -> Sequence[str]:
    """At most this many of some names, at equal distances; all of them if they are no more."""
    return names[:: max(-(-len(names) // most), 1)]
