"""The state of training as named parts, and reading them from a checkpoint.

    {"model": {"w": tensor}, "progress": {"steps": 3}}   ──▶   tensors  model.w           items  progress.steps

Tensors are in safetensors files, items in the manifest. A dtype that safetensors does not have is stored as bytes, with
a last dimension of its item size. Files are checked against the manifest first, and then read into tensors of a
pipeline.

Where ranks share stages, parts are joined to whole tensors for writing, and cut again for reading, so that training can
resume over another number of them; ``state_dict`` and ``load_state_dict`` do the same without files::

    part of each rank ──gather──▶ whole ──▶ files          files ──▶ whole ──narrow──▶ part of this rank
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import define, evolve, field
from torch import Tensor

from ...core.errors import PanpipeError, RequestError, in_a_line
from ..launch.rank_tensors import RankTensors, Split
from ..update.optimizer_state import leaves_of
from ..weights.checkpoint import Entry, entries_of, read_tensors
from .manifest import ANOTHER, FOREIGN, Manifest, check_listing, read_manifest, read_record

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


@define
class CheckpointReader:
    """A checkpoint whose parts are known by name; `check` has to come before `read_into`.

    Attributes:
        tensors: by name; all other parts are the items of the manifest.

    Raises:
        RequestError: it is not whole, or was not written by panpipe. The message names the file.
    """

    folder: Path
    manifest: Manifest = field(init=False)
    tensors: dict[str, Entry] = field(factory=dict, init=False)
    _checked: set[str] = field(factory=set, init=False)
    _splits: dict[str, tuple[Split, Entry]] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.manifest = read_manifest(self.folder)
        with self._named():
            check_listing(self.folder, self.manifest)
        for name in self.manifest.files:
            with self._named(name):
                found = self._tensors_in(name)
            twice = next((each for each in found if each in self.tensors or each in self.manifest.items), None)
            if twice is not None:
                raise RequestError(
                    f"'{self.folder / name}' has '{twice[:100]}', which another file or the manifest has: {FOREIGN}"
                )
            self.tensors |= found

    def check(self, files: Collection[str]) -> None:
        """Compare files with their hashes.

        Raises:
            RequestError: one was changed; the message names it.
        """
        for name in files:
            if name not in self._checked:
                with self._named(name):
                    found = read_record(self.folder / name)
                if found != self.manifest.files[name]:
                    raise RequestError(
                        f"'{self.folder / name}' was changed since it was written: its hash differs; {ANOTHER}"
                    )
                self._checked.add(name)

    def narrow(self, own: Mapping[str, Tensor], ranks: RankTensors) -> None:
        """Read this rank's parts of tensors from now on."""
        for name, tensor in own.items():
            split, stored = split_of(name, tensor, ranks), self.tensors.get(name)
            part = None if split is None or stored is None else split.part_shape(stored.shape)
            if split is not None and stored is not None and part is not None:  # others are refused with their shapes
                self._splits[name], self.tensors[name] = (split, stored), evolve(stored, shape=part)

    def read_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite tensors of the same shapes and dtypes with those of the checkpoint."""
        with torch.no_grad():
            read_tensors(self.tensors, {n: t.detach() for n, t in tensors.items() if n not in self._splits})
            for name in tensors.keys() & self._splits:
                split, stored = self._splits[name]
                whole = torch.empty(stored.shape, dtype=stored.dtype)
                stored.read_into(whole)
                tensors[name].detach().copy_(split.part_of(whole))

    def whole(self) -> Parts:
        """All parts, with tensors on the CPU; every file is checked."""
        self.check(self.manifest.files)
        tensors = {name: torch.empty(kept.shape, dtype=kept.dtype) for name, kept in self.tensors.items()}
        self.read_into(tensors)
        return Parts(tensors, self.manifest.items)

    def _tensors_in(self, name: str) -> dict[str, Entry]:
        try:
            found = entries_of(self.folder / name)
        except RequestError:
            self.check([name])  # a file that was changed is refused with its hash
            raise
        for tensor, dtype in self.manifest.stored_as_bytes.items():
            if tensor in found:
                *shape, size = found[tensor].shape or (0,)
                if found[tensor].stored_as != "U8" or size != dtype.itemsize:
                    raise ValueError(f"'{tensor[:100]}' does not have the bytes of {dtype}")
                found[tensor] = evolve(found[tensor], dtype=dtype, shape=tuple(shape))
        odd = next((n for n, e in found.items() if e.dtype is None or any(size >= 1 << 63 for size in e.shape)), None)
        if odd is not None:
            raise ValueError(f"'{odd[:100]}' is not a tensor of a checkpoint")
        return found

    @contextmanager
    def _named(self, name: str = "") -> Iterator[None]:
        """A context that raises what a damaged or hostile file causes as a RequestError with the file's name."""
        path = self.folder / name if name else self.folder
        try:
            yield
        except PanpipeError:
            raise
        except OSError as error:
            raise RequestError(
                f"cannot read '{path}': {error.strerror}; every rank must be able to read the checkpoint"
            ) from None
        except Exception as error:
            raise RequestError(f"'{path}' cannot be read ({in_a_line(error)[:300]}): {FOREIGN}") from None


def split_of(name: str, tensor: Tensor, ranks: RankTensors) -> Split | None:
    """How a tensor of a checkpoint is divided over ranks; None if each has all of it."""
    section, _, rest = name.partition(".")
    names = [rest]
    if section == "ema":
        names = [rest.split(".", 2)[-1]]
    elif section == "optimizer":
        words = rest.removeprefix("state.").split(".")
        names = [".".join(words[:end]) for end in range(len(words) - 1, 0, -1)]
    found = (ranks.split_of(each, tuple(tensor.shape)) for each in names)
    return next((split for split in found if split is not None), None)


def gathered(parts: Parts, ranks: RankTensors) -> Parts:
    """The parts with whole tensors. All ranks of a stage call this together."""
    found = dict(parts.tensors)
    for name, tensor in sorted(parts.tensors.items()):
        split = split_of(name, tensor, ranks)
        if split is not None:
            found[name] = ranks.gather(tensor, split)
    return Parts(found, parts.items)


def narrowed(parts: Parts, own: Mapping[str, Tensor], ranks: RankTensors) -> Parts:
    """The parts with this rank's parts of whole tensors; those of other shapes stay, and are refused with these.

    Args:
        parts: with whole tensors, and perhaps more than this rank needs.
    """
    found = dict(parts.tensors)
    for name, tensor in own.items():
        split = split_of(name, tensor, ranks)
        if split is not None and name in found and split.part_shape(tuple(found[name].shape)) == tuple(tensor.shape):
            found[name] = split.part_of(found[name]).clone()
    return Parts(found, parts.items)
