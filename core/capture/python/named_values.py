"""Finds the values that the code of a step names: attributes of modules and other objects, variables, globals.

    step, forwards of the model's modules ──▶ uses of values in their code            (named.py)
        └──▶ functions that they name ──▶ uses in these ──▶ …

A value is found by following the attributes of a use from where it begins; properties are read as code and not called.
A name that is loaded from a variable of unknown content, such as ``layer.scale`` in a loop, counts for every module,
and for objects that the code passes on as a whole. The user's own code and model libraries are read; of the globals,
only those of the user's own code count, and of objects of other libraries outside of the model only attributes that the
user's code names.
"""

import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import numpy
import torch
from attrs import define, evolve, field
from torch import Tensor, nn

from ..values.code_origin import Origin, origin_of
from .named import (
    ALL,
    CONTAINERS,
    FREE,
    GLOBAL,
    MISSING,
    OWNER,
    RESULT,
    VARIABLE,
    Named,
    Use,
    is_plain,
    is_small_container,
    items_of,
    uses_in,
)

_NOT_RUN = {"__init__", "__new__", "__repr__", "__str__", "__setattr__", "__delattr__", "__del__", "__reduce__",
            "__reduce_ex__", "__getstate__", "__setstate__", "__deepcopy__", "__copy__", "__init_subclass__",
            "__subclasshook__", "__dir__", "__sizeof__", "__class_getitem__", "__hash__"}  # fmt: skip


@define(eq=False)
class NamedValues:
    """The values that a step's code names.

    Args:
        model: the user's module.
        step: the user's function.

    Attributes:
        named: the values.
        modules: modules with their places: those of the model, and others that the code names.
        codes: the functions that were read.
        containers: lists, dicts and sets that the code names, or that are in these, with their places.
        caches: functions with a cache of their results.
        own: dicts of attributes among which a name was looked up and not found; a name may be added.
    """

    model: nn.Module
    step: Any
    named: dict[tuple[int, Any], Named] = field(factory=dict)
    modules: dict[int, tuple[str, nn.Module]] = field(factory=dict)
    codes: dict[types.CodeType, None] = field(factory=dict)
    containers: dict[int, tuple[str, Any]] = field(factory=dict)
    caches: dict[int, Any] = field(factory=dict)
    _tensors: dict[int, tuple[str, Tensor]] = field(factory=dict)
    own: dict[int, dict[str, Any]] = field(factory=dict)
    _kept: dict[int, Any] = field(factory=dict)
    _seen: set[Any] = field(factory=set)
    _waiting: list[tuple[types.FunctionType, "_Object | None"]] = field(factory=list)
    _loose: list[tuple[types.CodeType, Use, bool]] = field(factory=list)
    _objects: list["_Object"] = field(factory=list)
    _reading: dict[str, str] = field(factory=dict)
    _looked_up: dict[tuple[Any, ...], list[tuple[types.CodeType, Use, bool]]] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self._visit("the step", self.step, False)
        self._visit("model", self.model, True)
        while self._waiting or any(each.applied < len(self._loose) for each in self._objects):
            while self._waiting:
                self._function(*self._waiting.pop())
            now = len(self._loose)
            for each in list(self._objects):
                self._apply(each)
                each.applied = now

    @property
    def trained(self) -> list[tuple[str, Tensor]]:
        """Tensors outside of the model that require a gradient, with their places."""
        mine = set(map(id, self.model.parameters()))
        named = [
            (f"{place}.{name}", p) for place, module in self.modules.values() for name, p in module._parameters.items()
            if p is not None
        ]  # fmt: skip
        found = {id(t): (place, t) for place, t in (*named, *self._tensors.values()) if id(t) not in mine}
        return [(place, t) for place, t in found.values() if t.requires_grad and t.is_leaf]

    def reading(self, attribute: str) -> str:
        """A line that reads an attribute of any object; "" if there is none."""
        if not self._reading:
            for code in self.codes:
                for use in uses_in(code):
                    if use.reads:
                        self._reading.update(dict.fromkeys(use.attributes, f"{code.co_filename}:{use.line}"))
        return self._reading.get(attribute, "")

    def _function(  # noqa: PLR0912 - one case for each root of a use
        self, function: types.FunctionType, owner: "_Object | None"
    ) -> None:
        code, origin = function.__code__, origin_of(function.__code__.co_filename)
        key = id(function), id(owner.value) if owner else 0
        if key in self._seen:
            return
        self._seen.add(key)
        self._kept[id(function)] = function
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        if origin is Origin.INTERNAL:  # such as a decorator around a function of the user's
            for cell in cells.values():
                if isinstance(content := _content(cell), _FUNCTIONS):
                    self._visit(function.__name__, content, False)
            return
        self.codes[code] = None
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._visit(f"a default of {function.__name__}", default, owner is not None and owner.mine)
        if origin is Origin.USER and function.__defaults__:
            self._note_part(f"the defaults of {function.__name__}", function, "__defaults__", code)
        for use in uses_in(code):
            if use.root == OWNER and owner is not None:
                self._follow(owner.place, owner.value, use, code, owner.mine)
            elif use.root == FREE and use.name in cells:
                if (content := _content(cells[use.name])) is not MISSING:
                    if origin is Origin.USER:
                        self._note(use.name, cells[use.name], None, content, code, use, not use.attributes)
                    self._follow(use.name, content, use, code, False, origin is not Origin.USER)
            elif use.root == GLOBAL:
                self._global(function.__globals__, use, code, origin)
            elif use.attributes:
                loose = evolve(use, root=VARIABLE) if use.root == OWNER else use
                self._loose.append((code, loose, origin is Origin.USER))

    def _global(self, variables: dict[str, Any], use: Use, code: types.CodeType, origin: Origin) -> None:
        if use.name not in variables:
            return
        if origin is Origin.USER:
            self._note(use.name, variables, use.name, variables[use.name], code, use, not use.attributes)
        self._follow(use.name, variables[use.name], use, code, False, origin is not Origin.USER)

    def _follow(
        self, place: str, value: Any, use: Use, code: types.CodeType, mine: bool, only_code: bool = False
    ) -> None:
        """Follow the attributes of a use from a value.

        Args:
            mine: whether the value belongs to the model.
            only_code: whether nothing is noted on the way: from a global of a library to its functions.
        """
        for number, name in enumerate(use.attributes):
            last = number == len(use.attributes) - 1
            found = self._attribute(place, value, name, use if last else evolve(use, reads=True), code, mine, only_code)
            if found is MISSING:
                return
            place, value = f"{place}.{name}", found
        if only_code and not issubclass(type(value), (*_FUNCTIONS, type)):
            return
        if use.reads or issubclass(type(value), CONTAINERS):
            self._visit(place, value, mine)

    def _attribute(  # noqa: PLR0911, PLR0912 - one case for each place of an attribute
        self, place: str, value: Any, name: str, use: Use, code: types.CodeType, mine: bool, only_code: bool
    ) -> Any:
        """The value of an attribute, which is noted; `MISSING` if nothing follows from it."""
        there, kind = f"{place}.{name}", type(value)
        if issubclass(kind, types.ModuleType):
            if name in value.__dict__ and _is_users_module(value):
                self._note(there, value.__dict__, name, value.__dict__[name], code, use)
            return value.__dict__.get(name, MISSING)
        if issubclass(kind, Tensor) or is_plain(value):
            return MISSING
        own: Any = _own(value)
        if name.endswith(ALL) or name == "__dict__":
            begin = name.removesuffix(ALL).removesuffix("__dict__")
            for key, held in list((own or {}).items()):
                meant = key.startswith(begin) if begin else not key.startswith("_")
                if meant and (is_plain(held) or (begin and is_small_container(held))):
                    self._note(f"{place}.{key}", own, key, held, code, use)
            return MISSING
        base, inherited = _inherited(value if issubclass(kind, type) else kind, name)
        if isinstance(inherited, property):
            self._wait(inherited.fget, place, value, mine)
            return MISSING
        if own is not None and not issubclass(kind, type) and name in own:
            if not only_code:
                self._note(there, own, name, own[name], code, use)
            return own[name]
        if issubclass(kind, nn.Module):
            for held in (value._parameters, value._buffers, value._modules):
                if name in held:
                    return held[name]
        if own is not None and not issubclass(kind, type) and _function_in(inherited) is None:
            self._note(there, own, name, MISSING, code, use)  # it may be assigned
            held = (own, value._modules) if issubclass(kind, nn.Module) else (own,)
            self.own.update({id(one): one for one in held})
        if inherited is MISSING or isinstance(inherited, types.MemberDescriptorType):
            if inherited is not MISSING and hasattr(value, name):
                self._note(there, value, name, getattr(value, name), code, use)
                return getattr(value, name)
            return MISSING
        if (function := _function_in(inherited)) is not None:
            known = mine or issubclass(kind, nn.Module | type) or _origin_of_class(kind) in (Origin.USER, Origin.LAYERS)
            bound = not isinstance(inherited, staticmethod) and not issubclass(kind, type)
            if known:
                self._wait(function, place if bound else None, value, mine)
        if not only_code and (is_plain(inherited) or _origin_of_class(base) is Origin.USER):
            self._note(there, base, name, inherited, code, use)
        return MISSING if function is not None else inherited

    def _note(
        self, place: str, holder: Any, key: Any, value: Any, code: types.CodeType, use: Use, last: bool = True
    ) -> None:
        identity = id(holder), key
        if identity not in self.named:
            self.named[identity] = Named(place, holder, key, value)
            self._kept[id(holder)] = holder
        self.named[identity].note(code, use if last else evolve(use, reads=True))

    def _note_part(self, place: str, holder: Any, key: str, code: types.CodeType) -> None:
        """Note an attribute of a function or of a partial function, which calls of it read."""
        use = Use(OWNER, "", (key,), code.co_firstlineno)
        self._note(place, holder, key, getattr(holder, key), code, use)

    def _wait(self, function: Any, place: str | None, value: Any, mine: bool) -> None:
        while not isinstance(function, types.FunctionType):
            if isinstance(function, functools._lru_cache_wrapper):
                self.caches[id(function)] = function
            if (function := getattr(function, "__wrapped__", None)) is None:
                return
        self._waiting.append((function, None if place is None else _Object(place, value, mine)))

    def _visit(self, place: str, value: Any, mine: bool) -> None:  # noqa: PLR0912 - one case for each kind of value
        """Visit a value that code uses as a whole: it may call it, pass it on, or take its items."""
        kind = type(value)
        if is_plain(value) or ("visited", id(value)) in self._seen:
            return
        self._kept[id(value)] = value  # alive, so that no other object gets its identity
        self._seen.add(("visited", id(value)))
        if issubclass(kind, nn.Module):
            for name, module in value.named_modules():
                self._module(f"{place}.{name}" if name else place, module)
        elif issubclass(kind, types.FunctionType):
            step = value is self.step
            self._wait(value, "model" if step else None, self.model if step else None, mine)
        elif issubclass(kind, types.MethodType):
            self._wait(value.__func__, f"{place}'s object", value.__self__, mine)
        elif issubclass(kind, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self._visit(place, part, mine)
            code = getattr(value.func, "__code__", None)
            if code is not None and origin_of(code.co_filename) is Origin.USER:
                self._note_part(f"the keywords of {place}", value, "keywords", code)
                self._note_part(f"the arguments of {place}", value, "args", code)
        elif issubclass(kind, functools._lru_cache_wrapper):
            self._wait(value, None, None, mine)
        elif issubclass(kind, type):
            if _origin_of_class(value) in (Origin.USER, Origin.LIBRARY):
                run = issubclass(value, torch.autograd.Function) or _origin_of_class(value) is Origin.USER
                for held in vars(value).values() if run else ():
                    if (function := _function_in(held)) is not None:
                        self._wait(function, None, None, mine)
        elif issubclass(kind, Tensor):
            self._tensors[id(value)] = place, value
        elif issubclass(kind, CONTAINERS):
            if not issubclass(kind, tuple | frozenset):
                self.containers[id(value)] = place, value
            for number, item in enumerate(items_of(value) if is_small_container(value) else ()):
                self._visit(f"{place}[{number}]", item, mine)
        elif not issubclass(kind, types.ModuleType | numpy.ndarray):
            self._object(place, value, mine)

    def _module(self, place: str, module: nn.Module) -> None:
        if id(module) in self.modules or isinstance(module, torch.jit.ScriptModule):
            return
        self.modules[id(module)] = place, module
        self.own[id(module.__dict__)] = module.__dict__  # its forward may be replaced
        self._object(place, module, True, "forward" if "forward" not in module.__dict__ else "")
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            self._visit(f"a hook of {place}", hook, True)
        if "forward" in module.__dict__:
            self._visit(f"{place}.forward", module.__dict__["forward"], True)

    def _object(self, place: str, value: Any, mine: bool, run: str = "") -> None:
        """Visit an object that may be used as a whole, and the methods of it that run without being named."""
        kind = type(value)
        self._objects.append(_Object(place, value, mine))
        self._kept[id(value)] = value
        if not issubclass(kind, nn.Module) and _origin_of_class(kind) is not Origin.USER:
            return
        for function in _special_methods(kind):
            self._wait(function, place, value, mine)
        if run and (function := _function_in(_inherited(kind, run)[1])) is not None:
            self._wait(function, place, value, mine)

    def _apply(self, each: "_Object") -> None:
        """Look up, in one object, the names that code loads from variables of unknown content."""
        kind: Any = type(each.value)
        own = _own(each.value) or {}
        module = isinstance(each.value, nn.Module)
        trainer = getattr(self.step, "__self__", None)  # its loss is not that of the model's result
        foreign = not module and not each.mine and _origin_of_class(kind) is not Origin.USER
        for code, use, users in self._meant(kind, own, each.applied):
            if module and use.attributes == ("forward",):
                continue  # visited with the module
            if use.attributes[0] == "training" and _origin_of_class(kind) is Origin.LAYERS:
                continue  # what torch's layers compute depends on it only where their own code names it
            if (module or use.root != RESULT or each.value is not trainer) and (users or not foreign):
                self._follow(each.place, each.value, use, code, each.mine)

    def _meant(self, kind: type, own: dict[str, Any], first: int) -> list[tuple[types.CodeType, Use, bool]]:
        """Uses of variables of unknown content, from a number on, that may mean an object; the same for all objects of
        a class with the same attributes."""
        key = kind, first, len(self._loose), *own
        if key not in self._looked_up:
            names = own.keys() | _names_of_class(kind)
            self._looked_up[key] = [
                (code, use, users) for code, use, users in self._loose[first:]
                if use.attributes[0] in names or (users and use.attributes[0].endswith(ALL))
            ]  # fmt: skip
        return self._looked_up[key]


@define(eq=False)
class _Object:
    """An object.

    Args:
        place: as text.
        value: the object.
        mine: whether it belongs to the model.
        applied: number of loose uses that were looked up in it.
    """

    place: str
    value: Any
    mine: bool
    applied: int = 0


_FUNCTIONS = (types.FunctionType, types.MethodType, functools._lru_cache_wrapper, functools.partial)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return MISSING


def _own(value: Any) -> dict[str, Any] | None:
    """The attributes of an object, without its code; None if it has no dict of them."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return own if type(own) is dict else None


def _inherited(kind: type, name: str) -> tuple[type, Any]:
    """The class that has an attribute, and its value there; `MISSING` if none has, or only Python's or torch's own."""
    for base in type.__getattribute__(kind, "__mro__"):
        if name in vars(base):
            return (base, vars(base)[name]) if _origin_of_class(base) is not Origin.INTERNAL else (base, MISSING)
    return kind, MISSING


@functools.lru_cache(maxsize=1 << 12)
def _names_of_class(kind: type) -> frozenset[str]:
    """The names of attributes of a class and its bases, without those of Python and torch."""
    return frozenset(
        name for base in kind.__mro__ if _origin_of_class(base) is not Origin.INTERNAL for name in vars(base)
    )


def _special_methods(kind: type) -> Iterator[Callable[..., Any]]:
    """The methods of a class that operators and builtins call, such as ``__getitem__``."""
    for name in _names_of_class(kind):
        special = name.startswith("__") and name.endswith("__") and name not in _NOT_RUN
        if special and (function := _function_in(_inherited(kind, name)[1])) is not None:
            yield function


def _function_in(value: Any) -> Any:
    """The function of a method in a class; None for other attributes."""
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    if isinstance(value, functools.cached_property):
        return value.func
    return value if isinstance(value, types.FunctionType | functools._lru_cache_wrapper) else None


def _is_users_module(module: types.ModuleType) -> bool:
    file = module.__dict__.get("__file__")
    return module.__name__ == "__main__" or (file is not None and origin_of(file) is Origin.USER)


_origins: WeakKeyDictionary[type, Origin] = WeakKeyDictionary()


def _origin_of_class(kind: type) -> Origin:
    """The origin of the file that defines a class."""
    found = _origins.get(kind)
    if found is None:
        module = sys.modules.get(kind.__module__)
        file = getattr(module, "__file__", None)
        if kind.__module__ in ("builtins", "_io"):
            found = Origin.INTERNAL
        elif file is not None:
            found = origin_of(file)
        else:
            found = Origin.USER if module is None or kind.__module__ == "__main__" else Origin.INTERNAL
        _origins[kind] = found
    return found
