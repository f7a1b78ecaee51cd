"""The nested state of training as named parts: tensors for safetensors files, and items for the manifest.

    {"model": {"w": tensor}, "progress": {"steps": 3}}   ──▶   tensors  model.w           items  progress.steps

A dtype that safetensors does not have is stored as bytes, with a last dimension of its item size.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from ...core.errors import RequestError
from ..flat_bytes import flat_bytes
from ..update.optimizer_state import leaves_of
from ..weights.checkpoint import DTYPES, file_pieces
from .manifest import FileRecord, write_durable

_SECTIONS = ("model", "optimizer", "stepped", "progress")
_AVERAGES = "ema"


@define
class Parts:
    """The parts of a state, by name.

    Args:
        tensors: parameters, buffers, the optimizer's state, averages.
        items: everything else: plain data.
    """

    tensors: dict[str, Tensor] = field(factory=dict)
    items: dict[str, Any] = field(factory=dict)

    def add(self, section: str, values: Mapping[str, Any]) -> None:
        """Add the parts of a section. An option that is a tensor, such as a learning rate, is an item: other stages
        have it, too."""
        for name, value in values.items():
            held = isinstance(value, Tensor) and not name.startswith("param_groups.")
            (self.tensors if held else self.items)[f"{section}.{name}"] = value

    def section(self, section: str) -> dict[str, Any]:
        """The parts of a section, by their names in it."""
        start = f"{section}."
        every = (*self.tensors.items(), *self.items.items())
        return {name.removeprefix(start): value for name, value in every if name.startswith(start)}

    @property
    def names(self) -> list[str]:
        """The names of all parts."""
        return [*self.tensors, *self.items]

    def only(self, names: Iterable[str]) -> "Parts":
        """The parts of these names alone."""
        wanted = set(names)
        return Parts(
            {name: tensor for name, tensor in self.tensors.items() if name in wanted},
            {name: item for name, item in self.items.items() if name in wanted},
        )


def parts_of(state: Mapping[str, Any]) -> Parts:
    """The parts of a nested state from `state_of`; nothing is copied.

    Raises:
        RequestError: it is no such state.
    """
    if not {"model", "progress"} <= set(state):
        raise RequestError(
            "this is no state of a pipeline, as pipe.state_dict() returns it: for the weights of a model call "
            "model.load_state_dict(...) before panpipe.pipeline(...), or give Run(weights=) a safetensors file"
        )
    found = Parts(items={section: state[section] for section in ("scheduler", "scaler") if section in state})
    found.add(_AVERAGES, leaves_of(state.get(_AVERAGES, {})))
    for section in _SECTIONS:
        found.add(section, state.get(section, {}))
    return found


def state_of(parts: Parts) -> dict[str, Any]:
    """The nested state of parts, as users and ``torch.distributed.checkpoint`` get it.

    Raises:
        ValueError: a name belongs to no section of a state.
    """
    found: dict[str, Any] = {section: {} for section in _SECTIONS}
    for name, value in {**parts.tensors, **parts.items}.items():
        section, _, rest = name.partition(".")
        if name in ("scheduler", "scaler"):
            found[name] = value
        elif section == _AVERAGES and rest:
            number, _, inner = rest.partition(".")
            average = found.setdefault(section, {}).setdefault(number, {"updates": 0, "tensors": {}})
            held = average if inner == "updates" else average["tensors"]
            held[inner.removeprefix("tensors.")] = value
        elif section in _SECTIONS and rest:
            found[section][rest] = value
        else:
            raise ValueError(f"it has '{name[:100]}', which is no part of the state of training")
    return found


def write_tensor_file(path: Path, tensors: Mapping[str, Tensor]) -> tuple[FileRecord, dict[str, torch.dtype]]:
    """Write the tensors of one process.

    Returns:
        The file's size and hash, and the dtypes of tensors that are stored as bytes.

    Raises:
        OSError: the file cannot be written.
        RequestError: a tensor cannot be stored.
    """
    others = {name: tensor.dtype for name, tensor in tensors.items() if tensor.dtype not in DTYPES.values()}
    stored = {name: _stored(name, tensor, name in others) for name, tensor in tensors.items()}
    return write_durable(path, file_pieces(stored)), others


def _stored(name: str, tensor: Tensor, as_bytes: bool) -> Tensor:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise RequestError(
            f"'{name}' is a {tensor.layout} tensor: a checkpoint can store only dense tensors; convert it"
        )
    if not as_bytes:
        return tensor
    flat = flat_bytes(tensor.detach().resolve_conj().resolve_neg())
    return flat.reshape(*tensor.shape, tensor.dtype.itemsize)
