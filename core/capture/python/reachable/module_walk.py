"""What a step can reach from a module or a class: attributes, methods, hooks, the shapes of tensors."""

import functools
import types
from typing import Any

import torch
from torch import nn

from ...values.code_origin import Origin
from .compared_values import is_leaf
from .walk import Walk, is_users_function, origin_of_class

_RUN = ("forward", "backward", "setup_context", "vjp")
"""Methods of modules and autograd functions that are called without being named."""
_NOT_RUN = {"__init__", "__new__", "__repr__", "__str__", "__setattr__", "__delattr__", "__del__", "__reduce__",
            "__reduce_ex__", "__getstate__", "__setstate__", "__deepcopy__", "__copy__", "__init_subclass__",
            "__subclasshook__", "__dir__", "__sizeof__", "__class_getitem__", "__hash__"}  # fmt: skip


def visit_module(walk: Walk, place: str, module: nn.Module, depth: int) -> None:
    """Visit a module: its class, attributes, hooks, parameters, buffers and submodules."""
    walk.values[place] = "a module", f"{type(module).__module__}.{type(module).__qualname__}"
    if isinstance(module, torch.jit.ScriptModule):
        return  # its attributes are not Python values
    own: dict[str, Any] = module.__dict__
    walk.add_probe(functools.partial(type, module), type(module))
    walk.values[f"{place}.training"] = "bool", module.training
    walk.add_probe(functools.partial(own.get, "training"), module.training)
    visit_class(walk, type(module), depth)
    walk.visit_attributes(place, own, depth)
    if "forward" in own and "forward" not in walk.known:
        walk.visit_entries(place, own, ["forward"], depth)
    for hooks in ("_forward_hooks", "_forward_pre_hooks"):
        walk.sizes.append((own[hooks], len(own[hooks])))
        for number, hook in own[hooks].items():
            walk.add_entry(f"{place}.{hooks}", own[hooks], number)
            walk.visit(f"{place}'s hook {len(walk.entries)}", hook, depth + 1)
    for held in (module._parameters, module._buffers):
        walk.sizes.append((held, len(held)))
        for name, tensor in held.items():
            walk.add_entry(f"{place}.{name}", held, name)
            what = None if tensor is None else (tuple(tensor.shape), tensor.dtype, walk.identity(tensor))
            trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
            walk.values[f"{place}.{name}"] = what
            if tensor is not None:
                walk.note_trained(f"{place}.{name}", tensor)
            if isinstance(tensor, nn.Parameter):
                walk.values[f"{place}.{name}.requires_grad"] = "bool", trained
    walk.orders.append((module._modules, list(module._modules)))
    walk.values[f"the order of {place}'s modules"] = "names", tuple(module._modules)
    for name, child in module._modules.items():
        walk.add_entry(f"{place}.{name}", module._modules, name)
        if child is not None:
            walk.visit(f"{place}.{name}", child, depth + 1)


def visit_class(walk: Walk, kind: type, depth: int) -> None:
    """Visit a class and its bases: the functions that a step may call, and the attributes that reached code names."""
    for base in kind.__mro__:
        if id(base) in walk.classes:
            continue
        walk.classes[id(base)] = base
        origin = origin_of_class(base)
        if origin is Origin.INTERNAL:
            _visit_others(walk, base, depth)
            continue
        for name, value in list(vars(base).items()):
            run = name in _RUN or (name.startswith("__") and name.endswith("__") and name not in _NOT_RUN)
            if not run and not (walk.reads(name, value) and (name in walk.known or is_leaf(value))):
                continue
            function = _function_in(value)
            if function is not None:
                walk.visit(f"{base.__name__}.{name}", function, depth + 1)
            elif name.startswith("__") or isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType):
                continue
            elif origin is Origin.USER or is_leaf(value):  # no objects that other libraries keep for themselves
                walk.visit(f"{base.__name__}.{name}", value, depth + 1, (base, name))
            if origin is Origin.USER or function is not None:
                _add_attribute(walk, base, name, value)


def _visit_others(walk: Walk, base: type, depth: int) -> None:
    """Numbers, texts and functions of the user's in a class of another package, and its own functions by identity."""
    for name in walk.known.names.intersection(vars(base)):
        value = vars(base)[name]
        if is_leaf(value) or is_users_function(value):
            walk.visit(f"{base.__name__}.{name}", value, depth + 1, (base, name))
            _add_attribute(walk, base, name, value)
        elif isinstance(value, types.FunctionType | types.BuiltinFunctionType | types.MethodDescriptorType):
            walk.values[f"{base.__name__}.{name}"] = "a function", value
            _add_attribute(walk, base, name, value)


def _add_attribute(walk: Walk, base: type, name: str, value: Any) -> None:
    walk.add_variable(functools.partial(vars(base).get, name), functools.partial(setattr, base, name), value)


def _function_in(value: Any) -> Any:
    """The function of a method or property in a class; None for other attributes."""
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    if isinstance(value, property):
        return value.fget
    if isinstance(value, functools.cached_property):
        return value.func
    return value if isinstance(value, types.FunctionType | functools._lru_cache_wrapper) else None
