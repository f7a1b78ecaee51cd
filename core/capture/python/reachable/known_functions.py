"""Functions that may be called in addition to the step's own calls: those of Python itself, torch and numpy.

The user's own functions may count, read a file, wait for something or take long, and a program in which they are called
more often is another program. So none of them is called to compare what it returns; what their code reads is compared
instead. The same holds for functions of other packages.
"""

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ...values.code_origin import Origin, is_users_own, origin_of

_COMPILED = types.BuiltinFunctionType
"""The class of functions and methods written in C."""


def known_function(names: tuple[str, ...], variables: Mapping[str, Any]) -> Any:
    """The function of a dotted name, if it is in a module or class and may be called; None otherwise.

    Nothing of the user's runs to find it, such as a module's ``__getattr__`` or a property of a class.

    Args:
        names: of a variable, and of attributes.
        variables: name → value.
    """
    value = variables.get(names[0])
    for name in names[1:]:
        if isinstance(value, type) and name == "__subclasses__" and type(value) is type:
            value = functools.partial(type.__subclasses__, value)
            return value if name is names[-1] else None
        if not isinstance(value, types.ModuleType | type):
            return None
        module = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
        value = getattr(value, name, None) if _is_known(module) else vars(value).get(name)
    return value if _may_be_called(value) else None


def library_function(names: tuple[str, ...], variables: Mapping[str, Any]) -> types.FunctionType | None:
    """The function of a dotted name, if it is in a module of another installed package; None otherwise.

    Args:
        names: of a variable, and of attributes.
        variables: name → value.
    """
    value = variables.get(names[0])
    for name in names[1:]:
        value = vars(value).get(name) if isinstance(value, types.ModuleType) else None
    found = isinstance(value, types.FunctionType) and origin_of(value.__code__.co_filename) is Origin.LIBRARY
    return value if found else None


def _is_known(module: str | None) -> bool:
    """Whether a module is part of Python, torch or numpy; a file of the user's may have the name of one."""
    package = (module or "").partition(".")[0]
    if package not in sys.stdlib_module_names and package not in ("torch", "numpy"):
        return False
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return file is None or not is_users_own(file)


def _may_be_called(value: Any) -> bool:
    if isinstance(value, functools._lru_cache_wrapper):
        return _may_be_called(value.__wrapped__)
    if isinstance(value, types.FunctionType):
        return _is_known(value.__module__) and "<locals>" not in value.__qualname__  # both are those of what it wraps
    if not isinstance(value, types.MethodType | _COMPILED):
        return False
    owner: Any = value.__self__
    if isinstance(value, _COMPILED) and (owner is None or isinstance(owner, types.ModuleType)):
        return _is_known(value.__module__ or getattr(owner, "__name__", None))
    # A method of the one object of a module, such as random.getstate; not of an object of the user's.
    module = (owner if isinstance(owner, type) else type(owner)).__module__
    places = [vars(sys.modules[name]) for name in (module, module.rpartition(".")[0]) if name in sys.modules]
    shared = any(place.get(value.__name__) == value for place in places)
    return _is_known(module) and (shared or isinstance(owner, type))


class _Entered(BaseException):
    """The user's code would run."""


def without_users_code(call: Callable[[], Any]) -> Any:
    """What a call returns; None if it fails, or if it would run a function of the user's, which does not begin."""
    try:
        with _users_code_refused():
            return call()
    except (Exception, _Entered):  # the call's own, such as that there is no process group
        return None


@contextlib.contextmanager
def _users_code_refused() -> Iterator[None]:
    def profile(frame: types.FrameType, event: str, _argument: Any) -> None:
        file = frame.f_code.co_filename
        generated = file == "<string>" and frame.f_globals.get("__name__") != "__main__"  # as for named tuples
        if event == "call" and is_users_own(file) and not generated:
            raise _Entered

    earlier = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(earlier)
