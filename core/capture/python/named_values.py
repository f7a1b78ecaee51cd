"""Finds the values that the code of a step names: attributes of modules and other objects, variables, globals.

    step, forwards of the model's modules ──▶ names in their code                     (named.py)
        └──▶ functions that they name ──▶ names in these ──▶ …

The name of an attribute counts for all objects that are reached in this way: the model's modules, variables that the
code names, and objects that are such an attribute. After ``self`` it counts for the method's object alone. Properties
are read as code and not called. The user's own code and model libraries are read; of the globals, only those of the
user's own code count, and of other libraries' objects outside of the model only attributes that the user's code names.
"""

import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import numpy
import torch
from attrs import define, field
from torch import Tensor, nn

from ..values.code_origin import Origin, origin_of
from .named import (
    ALL,
    ATTRIBUTE,
    CONTAINERS,
    FREE,
    GLOBAL,
    MISSING,
    OWNER,
    RESULT,
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
        own: dicts of attributes, to which others may be added.
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
                    if use.reads and use.kind not in (GLOBAL, FREE):
                        self._reading[use.name] = f"{code.co_filename}:{use.line}"
        return self._reading.get(attribute, "")

    def _function(self, function: types.FunctionType, owner: "_Object | None") -> None:
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
        users = origin is Origin.USER
        for use in uses_in(code):
            if use.kind == OWNER and owner is not None:
                self._follow(owner, use, code)
            elif use.kind == FREE and use.name in cells:
                if (content := _content(cells[use.name])) is not MISSING:
                    self._variable(use.name, cells[use.name], None, content, use, code)
            elif use.kind == GLOBAL and use.name in function.__globals__:
                variables = function.__globals__
                self._variable(use.name, variables, use.name, variables[use.name], use, code)
            elif use.kind not in (FREE, GLOBAL):
                self._loose.append((code, use, users))

    def _variable(
        self, place: str, holder: Any, key: Any, value: Any, use: Use, code: types.CodeType, noted: bool = True
    ) -> None:
        """A use of a variable; of those that a library's code names only functions, classes and modules count.

        Args:
            noted: whether the variable is the user's own.
        """
        users = origin_of(code.co_filename) is Origin.USER
        if users and noted:
            self._note(place, holder, key, value, code, use)
        if issubclass(type(value), types.ModuleType):
            self._python_module(place, value, code)
        elif issubclass(type(value), (*_FUNCTIONS, type)) or (users and (use.reads or type(value) in CONTAINERS)):
            self._visit(place, value, False)

    def _python_module(self, place: str, module: types.ModuleType, code: types.CodeType) -> None:
        """The attributes of a module of Python that code names; those of torch's and Python's own do not count."""
        origin = (
            Origin.USER if module.__name__ == "__main__" else origin_of(module.__dict__.get("__file__") or "<frozen>")
        )
        if ("module", module, code) in self._seen or origin not in (Origin.USER, Origin.LIBRARY):
            return
        self._seen.add(("module", module, code))
        for use in uses_in(code):
            if use.kind == ATTRIBUTE and use.name in module.__dict__:
                value = module.__dict__[use.name]
                own = origin is Origin.USER
                self._variable(f"{place}.{use.name}", module.__dict__, use.name, value, use, code, own)

    def _follow(self, owner: "_Object", use: Use, code: types.CodeType, only_code: bool = False) -> None:
        """Follow a use of an attribute of an object.

        Args:
            only_code: whether nothing is noted: from a class of a library to its functions.
        """
        found = self._attribute(owner, use, code, only_code)
        if found is not MISSING and (use.reads or issubclass(type(found), CONTAINERS)):
            self._visit(f"{owner.place}.{use.name}", found, owner.mine)

    def _attribute(  # noqa: PLR0911, PLR0912 - one case for each place of an attribute
        self, owner: "_Object", use: Use, code: types.CodeType, only_code: bool
    ) -> Any:
        """The value of an attribute, which is noted; `MISSING` if nothing follows from it."""
        place, value, mine, name = owner.place, owner.value, owner.mine, use.name
        there, kind = f"{place}.{name}", type(value)
        if issubclass(kind, Tensor):
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

    def _note(self, place: str, holder: Any, key: Any, value: Any, code: types.CodeType, use: Use) -> None:
        identity = id(holder), key
        if identity not in self.named:
            self.named[identity] = Named(place, holder, key, value)
            self._kept[id(holder)] = holder
        self.named[identity].note(code, use)

    def _note_part(self, place: str, holder: Any, key: str, code: types.CodeType) -> None:
        """Note an attribute of a function or of a partial function, which calls of it read."""
        self._note(place, holder, key, getattr(holder, key), code, Use(OWNER, key, code.co_firstlineno))

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
            self._attributes_of(place, value, mine)
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
                self._objects.append(_Object(place, value, mine))
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
        self._object(place, module, True, "forward" if "forward" not in module.__dict__ else "")
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            self._visit(f"a hook of {place}", hook, True)
        if "forward" in module.__dict__:
            self._visit(f"{place}.forward", module.__dict__["forward"], True)

    def _object(self, place: str, value: Any, mine: bool, run: str = "") -> None:
        """Visit an object that may be used as a whole, and the methods of it that run without being named."""
        kind = type(value)
        module = issubclass(kind, nn.Module)
        self._attributes_of(place, value, mine)
        if not module and _origin_of_class(kind) is not Origin.USER:
            return
        for function in _special_methods(kind):
            self._wait(function, place, value, mine)
        if run and (function := _function_in(_inherited(kind, run)[1])) is not None:
            self._wait(function, place, value, mine)

    def _attributes_of(self, place: str, value: Any, mine: bool) -> None:
        """Look names up among the attributes of an object."""
        self._objects.append(_Object(place, value, mine))
        if (own := _own(value)) is not None and (mine or _origin_of_class(type(value)) is Origin.USER):
            self.own.update(
                {id(one): one for one in (own, *((value._modules,) if isinstance(value, nn.Module) else ()))}
            )

    def _apply(self, each: "_Object") -> None:
        """Look up, in one object, the names that code loads as attributes of any object."""
        kind: Any = type(each.value)
        module, is_class = issubclass(kind, nn.Module), issubclass(kind, type)
        trainer = getattr(self.step, "__self__", None)  # its loss is not that of the model's result
        origin = _origin_of_class(each.value if is_class else kind)
        foreign = not module and not each.mine and origin is not Origin.USER
        for code, use, users in self._meant(each.value if is_class else kind, _own(each.value) or {}, each.applied):
            if module and use.name == "forward":
                continue  # visited with the module
            if use.name == "training" and origin is Origin.LAYERS:
                continue  # what torch's layers compute depends on it only where their own code names it
            if (module or use.kind != RESULT or each.value is not trainer) and (users or is_class or not foreign):
                self._follow(each, use, code, only_code=foreign and not users)

    def _meant(self, kind: type, own: dict[str, Any], first: int) -> list[tuple[types.CodeType, Use, bool]]:
        """Uses of attributes of any object, from a number on, that an object has; the same for all objects of a class
        with the same attributes."""
        key = kind, first, len(self._loose), *own
        if key not in self._looked_up:
            names = own.keys() | _names_of_class(kind)
            self._looked_up[key] = [
                (code, use, users) for code, use, users in self._loose[first:]
                if use.name in names or (users and use.name.endswith(ALL))
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
