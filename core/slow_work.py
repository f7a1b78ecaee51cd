"""A call while work takes long, from another thread."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer


@contextmanager
def called_if_slow(after_s: float, function: Callable[..., object], *arguments: object) -> Iterator[None]:
    """Call a function from another thread if what follows takes longer than ``after_s`` seconds."""
    timer = Timer(after_s, function, arguments)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
