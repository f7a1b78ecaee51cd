"""Whether a value that a step reads is compared before each step."""

from collections.abc import Callable

from panpipe.core.capture.python.reads import Reads
from torch import nn


def assert_noticed(read: Callable[[], float], assign: Callable[[float], None]) -> None:
    """A step that reads a value is as before until the value is assigned, and not afterwards.

    Args:
        read: the step's code for it.
        assign: changes it.
    """
    model = nn.Linear(2, 2)

    def step(m, b):
        return m(b).sum() * read()

    before = Reads(model, step)
    assert before.unchanged()
    assert Reads(model, step).first_other(before) is None
    assign(2.0)
    assert read() == 2.0
    assert not before.unchanged()
    assert Reads(model, step).first_other(before) is not None
