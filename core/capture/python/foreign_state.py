"""Detects calls of a step that read a state which panpipe cannot compare: of a database, or of another process.

Objects of the standard library that are written in C, such as a connection to a database, show nothing of their state.
A step that calls their methods gets an answer that may be another one in the next step.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from ..values.code_origin import Origin, is_users_own, origin_of
from ..values.user_lines import calling_line
from .reachable.standard_objects import held_by

_COMPUTE = {
    "builtins", "_collections", "_contextvars", "_ctypes", "_functools", "_hashlib", "_io", "_operator", "_random",
    "_sre", "_struct", "_thread", "_weakref", "_weakrefset", "array", "collections", "contextvars", "datetime",
    "decimal", "functools", "hashlib", "io", "itertools", "operator", "random", "re", "struct", "threading", "time",
    "types", "weakref", "zlib", "zoneinfo",
}  # fmt: skip
"""Modules of classes written in C that only compute, or whose state is compared elsewhere."""
_ONLY_WRITE = {"put", "put_nowait", "writerow", "writerows", "acquire", "release"}
"""Methods of queues, of writers of tables and of locks that return nothing of the state."""
_OPENS = (("sqlite3", "connect"), ("dbm", "open"), ("subprocess", "run"), ("subprocess", "check_output"),
          ("socket", "create_connection"))  # fmt: skip
"""Functions that open something whose state cannot be compared: module and name."""


def has_foreign_state(value: Any) -> bool:
    """Whether an object's methods may return a state that cannot be read otherwise."""
    kind = type(value)
    module = kind.__module__
    if module in _COMPUTE or hasattr(value, "__dict__") or module.partition(".")[0] not in sys.stdlib_module_names:
        return False
    return held_by(value) is None


@contextmanager
def foreign_state_noted(objects: Iterable[Any], asks: Callable[[str, str], None]) -> Iterator[None]:
    """A context in which a function is called when the user's code asks for such a state.

    Args:
        objects: that have such a state; without any, only what the code opens is noted.
        asks: called with the user's line, and the class or function.
    """
    known = {id(one): one for one in objects}

    def profile(frame: Any, event: str, function: Any) -> None:
        owner = getattr(function, "__self__", None)
        if event != "c_call" or id(owner) not in known or function.__name__ in _ONLY_WRITE:
            return
        if is_users_own(frame.f_code.co_filename):
            kind = type(owner)
            asks(calling_line(frame), f"{kind.__module__}.{kind.__qualname__}.{function.__name__}")

    def noted(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            frame: Any = sys._getframe(1)
            while frame is not None and origin_of(frame.f_code.co_filename) is Origin.INTERNAL:
                frame = frame.f_back
            if frame is not None and is_users_own(frame.f_code.co_filename):
                asks(calling_line(frame), name)
            return original(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for module, name in _OPENS:
            found = sys.modules.get(module)
            original = getattr(found, name, None)
            if original is not None and not isinstance(original, type):
                stack.enter_context(mock.patch.object(found, name, noted(f"{module}.{name}", original)))
        if known:
            stack.callback(sys.setprofile, sys.getprofile())
            sys.setprofile(profile)
        yield
