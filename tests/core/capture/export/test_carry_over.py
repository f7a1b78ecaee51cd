"""A cut carried over to other shapes: what is refused. What is carried over trains in ``runtimes/batch``."""

import pytest
import torch
from panpipe.core.capture.export.carry_over import carry_over, cut_of
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.errors import RequestError
from torch import nn


class Crossing(nn.Module):
    """Layers whose order depends on the length, and one that short sequences alone go through."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        if x.shape[1] == 2:
            return self.b(self.c(self.a(x)))
        return self.b(self.a(x)) if x.shape[1] < 6 else self.a(self.b(x))


@pytest.mark.parametrize(
    ("length", "said"),
    [
        (6, "'b/linear' runs in stage 1.*and 'a/linear', which depends on it, in stage 0 .*build another pipeline"),
        (2, "'c/linear' uses 'c.weight', which no stage holds.*give an example batch"),
    ],
)
def test_cut_that_cannot_carry_over_is_refused_in_one_line(length, said):
    known, other = (
        operators_of(capture_step(Crossing(), lambda model, x: model(x).square().mean(), torch.zeros(2, n, 4)))
        for n in (4, length)
    )
    names = list(known.members)
    at = names.index("b/linear")
    cut = cut_of(known, [names[:at], names[at:]])
    with pytest.raises(RequestError, match=said) as refusal:
        carry_over(cut, other)
    assert "\n" not in str(refusal.value)
