"""Importing a framework, with an error that names the extra of panpipe that installs it."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """A context for the imports of a framework.

    Args:
        extra: the extra of panpipe that installs it.

    Raises:
        ImportError: the framework, or a part of it, is not installed; the message names the extra.
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        raise ImportError(
            f"panpipe.integrations.{extra} needs the package '{missing.name}', which is not installed: "
            f"pip install 'panpipe[{extra}]'",
            name=missing.name,
        ) from missing
