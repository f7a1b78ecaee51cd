"""The nested state of training as named parts: tensors for a safetensors file, and items for a JSON file.

    {"model": {"w": tensor}, "progress": {"steps": 3}}   ──▶   tensors  model.w           items  progress.steps

A dtype that safetensors does not have is stored as bytes, with a last dimension of its item size.
"""

from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from ...core.errors import RequestError
from ...core.files.json_reader import check_values, values_in
from ...core.files.limits import Limits
from ...core.plain_data import decode, encode
from ..flat_bytes import flat_bytes
from ..weights.checkpoint import DTYPES, file_head, file_pieces
from .manifest import FileRecord, read_regular, write_durable

_STORED = frozenset(DTYPES.values())
ITEMS = Limits(size=1 << 30)
"""Limits of a file of items; 100,000 parameters with 20 options each have some 100 MB and 3 million values."""


_SECTIONS = ("model", "optimizer", "stepped", "progress")


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
    for number, average in state.get("ema", {}).items():
        found.add(f"ema.{number}", {"updates": average["updates"]})
        found.add(f"ema.{number}.tensors", average["tensors"])
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
        elif section == "ema":
            number, _, inner = rest.partition(".")
            average = found.setdefault("ema", {}).setdefault(number, {"updates": 0, "tensors": {}})
            if inner == "updates":
                average["updates"] = value
            else:
                average["tensors"][inner.removeprefix("tensors.")] = value
        elif section in found and rest:
            found[section][rest] = value
        else:
            raise ValueError(f"it has '{name[:100]}', which is no part of the state of training")
    return found


@frozen
class PartNames:
    """The names of the two files of one process.

    Args:
        number: of the process, from 1.
        count: how many there are.
    """

    number: int
    count: int

    @property
    def tensors(self) -> str:
        """The safetensors file."""
        return f"tensors-{self.number:05d}-of-{self.count:05d}.safetensors"

    @property
    def items(self) -> str:
        """The JSON file."""
        return f"items-{self.number:05d}-of-{self.count:05d}.json"


def write_parts(folder: Path, names: PartNames, parts: Parts) -> dict[str, FileRecord]:
    """Write the two files of one process.

    Returns:
        File → its size and hash.

    Raises:
        OSError: a file cannot be written.
        RequestError: a part cannot be stored.
    """
    others = {name: tensor.dtype for name, tensor in parts.tensors.items() if tensor.dtype not in _STORED}
    tensors = {name: _stored(name, tensor) for name, tensor in parts.tensors.items()}
    text = items_text(parts.items, others)
    return {
        names.tensors: write_durable(folder / names.tensors, chain([file_head(tensors)], file_pieces(tensors))),
        names.items: write_durable(folder / names.items, [text]),
    }


def items_text(items: Mapping[str, Any], others: Mapping[str, torch.dtype]) -> bytes:
    """The contents of a file of items.

    Args:
        items: by name.
        others: tensor that is stored as bytes → its dtype.

    Raises:
        RequestError: an item is no plain data.
    """
    try:
        text = encode({"items": items, "stored_as_bytes": others}, objects=False)
    except TypeError as error:
        raise RequestError(f"a checkpoint can store only plain data, and {str(error).removeprefix('items.')}") from None
    if len(text) > ITEMS.size or values_in(text) > ITEMS.values:
        raise RequestError(
            f"the options of the optimizer and of the scheduler have more than {ITEMS.values} values or "
            f"{ITEMS.size >> 20} MiB, which no checkpoint can store: use fewer"
        )
    return text


def read_items(path: Path) -> tuple[dict[str, Any], dict[str, torch.dtype]]:
    """The items of a file, and the dtypes of tensors that are stored as bytes.

    Raises:
        OSError: it cannot be read.
        RequestError: it has too many values.
        ValueError: it is not such a file, or is nested too deep.
    """
    text = read_regular(path, ITEMS.size).decode()
    check_values(text, f"'{path}'", ITEMS)
    kept = decode(text, objects=False)
    if not isinstance(kept, dict) or set(kept) != {"items", "stored_as_bytes"}:
        raise ValueError("it does not have the items of a checkpoint")
    items, others = kept["items"], kept["stored_as_bytes"]
    if not isinstance(items, dict) or not isinstance(others, dict):
        raise ValueError("it does not have the items of a checkpoint")
    if not all(isinstance(dtype, torch.dtype) for dtype in others.values()):
        raise ValueError("it does not have the dtypes of tensors")
    return items, others


def _stored(name: str, tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise RequestError(
            f"'{name}' is a {tensor.layout} tensor: a checkpoint can store only dense tensors; convert it"
        )
    if tensor.dtype in _STORED:
        return tensor
    flat = flat_bytes(tensor.detach().resolve_conj().resolve_neg())
    return flat.reshape(*tensor.shape, tensor.dtype.itemsize)
