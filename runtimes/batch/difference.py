"""The difference of a batch from the example, in the message of a step that failed with it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ...core.errors import PanpipeError, WorkerError
from ..microbatches import Microbatch, Shape


@contextmanager
def naming_difference(example: Shape, pieces: Sequence[Microbatch]) -> Iterator[None]:
    """A context that adds to the failure of an operator in what a batch differs from the example.

    Failures that panpipe raises on purpose, and those of a rank that was lost, have other causes.

    Args:
        example: the shape of the example's largest microbatch.
    """
    try:
        yield
    except Exception as failure:
        stopped = isinstance(failure, WorkerError) and not failure.lost
        other = next(filter(None, (example.difference(piece.shape) for piece in pieces)), None)
        if other is not None and stopped:
            failure.args = (f"{failure}; {other}", *failure.args[1:])
        elif other is not None and not isinstance(failure, PanpipeError):
            failure.add_note(other)
        raise
