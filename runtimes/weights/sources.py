"""The sources of parameter values: a checkpoint or initialisation.

Values never depend on the plan. A checkpoint has them by name. Initialisation draws each module's random numbers from a
generator keyed by (seed, the module's name). It creates all tensors of the module, also those that other processes
hold, so that the values are the same for every cut; the extra memory is that of one module.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn

from ...core.errors import RequestError
from ..flat_bytes import flat_bytes
from ..watch.activity import HERE
from .checkpoint import Checkpoint
from .places import Place, allocate, places, tensor_at, unallocated

ModuleInit = Callable[[nn.Module], Any]
"""Sets the values of a module's own parameters and buffers in place, as FSDP's ``param_init_fn``."""

_UNSET_BYTE = 0xA5
"""Fills tensors without floating-point numbers before initialisation, to detect those that it does not set."""


class Weights(ABC):
    """A source of values for parameters and buffers."""

    @abstractmethod
    def check(self, read: Collection[str]) -> None:
        """Check before planning that `fill` will succeed.

        Args:
            read: names of all parameters and buffers that the step reads.

        Raises:
            RequestError: one of them has no value in this source, or one that does not fit.
        """

    def overwrites(self, name: str) -> bool:
        """Whether it sets a parameter or buffer even if the model has a value for it."""
        return False

    @abstractmethod
    def fill(self, held: Mapping[str, Tensor], unset: Collection[str]) -> None:
        """Set the values of this process's tensors.

        Args:
            held: the tensors that this process holds, by name.
            unset: names of those that have no value yet.
        """


def weights_from(given: "str | Path | ModuleInit | None", model: nn.Module, seed: int) -> Weights:
    """The source for the user's ``weights=``.

    Raises:
        RequestError: it has another type, or the checkpoint cannot be read.
    """
    if isinstance(given, str | Path):
        return FromCheckpoint(model, None, seed, Checkpoint(given))
    if isinstance(given, Mapping):
        raise RequestError(
            "weights is a dict: load it into the model before, by model.load_state_dict(...), or write it by "
            "safetensors.torch.save_file(...) and give the file's path"
        )
    if given is not None and not callable(given):
        raise RequestError(
            f"weights is {given!r}: give None, the path of a safetensors checkpoint, or a function init(module)"
        )
    return FromModules(model, given, seed)


@define
class FromModules(Weights):
    """Values by initialisation: of the modules or by the user's function. Tensors with values keep them.

    Args:
        init: called for each module; None for the module's own ``reset_parameters``.
    """

    model: nn.Module
    init: ModuleInit | None
    seed: int
    _places: dict[str, tuple[Place, ...]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._places = places(self.model)

    def check(self, read: Collection[str]) -> None:
        for name in read:
            first = self._places[name][0]
            if tensor_at(first).is_meta and self.init is None and _own_init(self._unit(first).module) is None:
                raise _no_init(first)

    def fill(self, held: Mapping[str, Tensor], unset: Collection[str]) -> None:
        units: dict[str, tuple[Place, set[str]]] = {}
        for name in held:
            if name in unset:
                unit = self._unit(self._places[name][0])
                units.setdefault(unit.path, (unit, set()))[1].add(name)
        for unit, names in units.values():
            self._initialise(unit, {name: held[name] for name in names})

    def _unit(self, place: Place) -> Place:
        """The unit of initialisation: the module itself, or an attention that also sets its child's parameters."""
        path, _, leaf = place.path.rpartition(".")
        parent = self.model.get_submodule(path) if place.path else None
        if self.init is None and isinstance(parent, nn.MultiheadAttention):
            return Place(path, parent, leaf)
        return place

    def _initialise(self, unit: Place, held: Mapping[str, Tensor]) -> None:
        HERE.doing(f"the initial values of '{unit.path}'")
        device = next(iter(held.values())).device
        tensors = {place: self._blank(place, held, device) for place in _own(unit.module, unit.path, self.init is None)}
        before = {place: tensor_at(place) for place in tensors}
        try:
            for place, tensor in tensors.items():
                _put(place, tensor)
            self._run(unit, device)
            for place, tensor in tensors.items():
                _take_over(place, tensor)
        finally:
            for place, tensor in before.items():
                _put(place, tensor)
        for place, tensor in tensors.items():
            if place.name in held and _unset(tensor):
                raise _left_out(place, self.init is None)

    def _blank(self, place: Place, held: Mapping[str, Tensor], device: torch.device) -> Tensor:
        """The tensor to initialise in a place: the one held here, or a temporary one."""
        original = tensor_at(place)
        if place.name in held:
            tensor = held[place.name]
        else:
            fresh = unallocated(original, device) if original.is_meta else original.detach().clone()
            tensor = nn.Parameter(fresh, original.requires_grad) if isinstance(original, nn.Parameter) else fresh
        if original.is_meta:
            allocate([tensor])
            _mark_unset(tensor)
        return tensor

    def _run(self, unit: Place, device: torch.device) -> None:
        init = self.init or _own_init(unit.module)
        if init is None:
            raise _no_init(unit)
        text = f"{self.seed},{unit.path}"
        seed = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
            torch.manual_seed(seed)
            init(unit.module)


@define
class FromCheckpoint(FromModules):
    """Values of a checkpoint, for tensors on meta and for others; those that it does not have, by initialisation."""

    checkpoint: Checkpoint

    def check(self, read: Collection[str]) -> None:
        parameters = [name for name in read if self._places[name][0].kind == "parameter"]
        missing = [name for name in parameters if self._find(name) is None]
        if missing:
            raise self.checkpoint.lacking(missing, len(parameters))
        for name in read:
            found, first = self._find(name), self._places[name][0]
            if found is not None:
                self.checkpoint.check(found, first.kind, tensor_at(first))
        super().check([name for name in read if self._find(name) is None])

    def fill(self, held: Mapping[str, Tensor], unset: Collection[str]) -> None:
        found = {name: there for name in held if (there := self._find(name)) is not None}
        with torch.no_grad():
            self.checkpoint.read_into({there: held[name] for name, there in found.items()})
        super().fill(held, [name for name in unset if name not in found])

    def overwrites(self, name: str) -> bool:
        return self._find(name) is not None

    def _find(self, name: str) -> str | None:
        """The tensor's name in the checkpoint: any of its names in the model."""
        return self.checkpoint.find(place.name for place in self._places[name] if place.persistent)


def _own_init(module: nn.Module) -> ModuleInit | None:
    """A module's own initialisation, if it has one."""
    if isinstance(module, nn.MultiheadAttention):
        return _reset_attention
    reset = getattr(module, "reset_parameters", None)
    return (lambda _: reset()) if callable(reset) else None


def _reset_attention(module: nn.Module) -> None:
    """Initialise as the constructor does: first the output layer's own reset, then that of the attention."""
    assert isinstance(module, nn.MultiheadAttention)
    module.out_proj.reset_parameters()
    module._reset_parameters()


def _own(module: nn.Module, path: str, with_children: bool) -> Iterator[Place]:
    """The places of the tensors that a module's initialisation sets."""
    nested = with_children and isinstance(module, nn.MultiheadAttention)
    for below, part in module.named_modules(prefix=path) if nested else [(path, module)]:
        for kind in (part._parameters, part._buffers):
            for leaf, tensor in kind.items():
                if tensor is not None:
                    yield Place(below, part, leaf)


def _put(place: Place, tensor: Tensor) -> None:
    """Put a tensor in a place; by attribute, because recurrent layers keep a separate list of weights."""
    setattr(place.module, place.leaf, tensor)


def _take_over(place: Place, tensor: Tensor) -> None:
    """Copy the new tensor if initialisation replaced a tensor instead of writing it in place."""
    now = tensor_at(place)
    if now is tensor:
        return
    if now.is_meta or now.shape != tensor.shape:
        state = "on meta" if now.is_meta else f"of shape {tuple(now.shape)}"
        raise RequestError(
            f"initialisation of {place.described} left {place.kind} '{place.leaf}' {state}: it must have values in "
            f"shape {tuple(tensor.shape)}; correct Run(weights=init) or reset_parameters()"
        )
    with torch.no_grad():
        tensor.copy_(now)


def _mark_unset(tensor: Tensor) -> None:
    """Mark a tensor, which has memory of its own, as not initialised."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.detach().fill_(float("nan"))
    else:
        tensor.untyped_storage().fill_(_UNSET_BYTE)  # type: ignore[attr-defined] # in a bool neither of its values


def _unset(tensor: Tensor) -> bool:
    """Whether initialisation did not set a tensor, or a part of one with floating-point numbers."""
    tensor = tensor.detach()
    if tensor.is_floating_point() or tensor.is_complex():
        # The sum takes no memory; if it is NaN, perhaps because of infinities of both signs, each element is checked.
        return bool(tensor.sum().isnan()) and bool(tensor.isnan().any())
    return tensor.numel() > 0 and bool((flat_bytes(tensor) == _UNSET_BYTE).all())


def _no_init(place: Place) -> RequestError:
    buffers = "; for a buffer, construct the model under panpipe.empty_weights(), which leaves buffers real"
    return RequestError(
        f"{place.kind} '{place.name}' is on the meta device, and its {place.described} has no reset_parameters(): "
        "its values are missing; pass Run(weights=init) or the path of a checkpoint that holds it"
        + (buffers if place.kind == "buffer" else "")
    )


def _left_out(place: Place, own: bool) -> RequestError:
    who = "reset_parameters()" if own else "init(module)"
    buffers = ", or construct the model under panpipe.empty_weights(), which leaves buffers real"
    return RequestError(
        f"{who} of {place.described} left {place.kind} '{place.name}' without values: it must set all tensors of the "
        "module; set it there" + (buffers if place.kind == "buffer" else "")
    )
