"""What a step can reach: the functions that it may call, the names that their code uses, the objects that it may read.

`reach` finds it.
"""

import io
import math
import os
import stat
import types
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from ..values.code_origin import is_users_own
from .reachable.code_names import line_in
from .reachable.compared_values import is_number


class Reached:
    """What a step reaches; a *place* is a text for messages, such as ``model.scale``.

    Attributes:
        values: place → a key that is compared, of the value there.
        entries: (dict, key, value) of every value that is looked up.
        places: of the entries, in the same order.
        sequence_places: of the sequences, in the same order.
        sizes: (dict of attributes, length).
        orders: (dict, its keys) of other dicts.
        sequences: (list, its items).
        codes: of the functions.
        probes: (function, its result) of values that are not in a dict.
        variables: (reads it, assigns it, value) of class attributes, slots and variables of enclosing functions.
        parameters: all parameters of the model, each once.
        caches: functions with a cache of their results.
        owners: place of a number → the object that holds it, and its key, index or attribute there.
        names_of: identity of a parameter or buffer of the model → its name.
        trained: (place, tensor) of tensors outside of the model that require a gradient.
        keyed: dicts and sets with tensors, or their identities, among their keys.
    """

    def __init__(self) -> None:
        self.values: dict[str, Hashable] = {}
        self.entries: list[tuple[dict[Any, Any], Any, Any]] = []
        self.places: list[str] = []
        self.sequence_places: list[str] = []
        self.sizes: list[tuple[dict[Any, Any], int]] = []
        self.orders: list[tuple[dict[Any, Any], list[Any]]] = []
        self.sequences: list[tuple[Any, list[Any]]] = []
        self.probes: list[tuple[Callable[[], Any], Any]] = []
        self.variables: list[tuple[Callable[[], Any], Callable[[Any], Any], Any]] = []
        self.parameters: list[nn.Parameter] = []
        self.codes: list[types.CodeType] = []
        self.caches: list[Any] = []
        self.owners: dict[str, tuple[Any, Any]] = {}
        self._seen: dict[int, Any] = {}
        self.names_of: dict[int, str] = {}
        self.keyed: list[Any] = []
        self.trained: list[tuple[str, Tensor]] = []

    def line_of(self, place: str) -> str:
        """The user's line, or a library's, that names the last part of a place."""
        name = place.replace("]", "").replace("[", ".").rpartition(".")[2].split(" ")[0].strip("'\"()")
        wanted = [name, *reversed(place.replace("[", ".").split(".")[:-1])]
        for word in wanted:
            for code in sorted(self.codes, key=lambda code: not is_users_own(code.co_filename)):
                line = line_in(code, word.strip("'\""))
                if line is not None:
                    return f"{code.co_filename}:{line}"
        first = next(iter(self.codes), None)
        return "the step" if first is None else f"{first.co_filename}:{first.co_firstlineno}"

    def holds(self, value: Any) -> bool:
        """Whether the step reaches an object, so that it exists before the step runs."""
        return id(value) in self._seen

    def note_trained(self, place: str, tensor: Tensor) -> None:
        """Record a tensor, if it is outside of the model and requires a gradient."""
        if tensor.requires_grad and tensor.is_leaf and id(tensor) not in self.names_of:
            self.trained.append((place, tensor))

    def place_of(self, tensor: Tensor) -> str:
        """The place of a tensor, or of one that shares its memory; "" if there is none."""
        where = tensor.untyped_storage().data_ptr()
        alike = {
            self.identity(value) for value in self._seen.values()
            if isinstance(value, Tensor) and not value.is_meta and value.untyped_storage().data_ptr() == where
        }  # fmt: skip
        return next((p for p, v in self.values.items() if isinstance(v, tuple) and v[1] in alike), "")

    def files(self) -> Iterator[tuple[str, Any]]:
        """Regular files that are open for writing, with their places; without the standard streams."""
        places = {key[1]: place for place, key in self.values.items() if isinstance(key, tuple) and len(key) == 2}
        for value in self._seen.values():
            if isinstance(value, io.IOBase) and not value.closed and value.writable() and value.seekable():
                with suppress(OSError):  # a file in memory has no descriptor
                    if stat.S_ISREG(os.fstat(value.fileno()).st_mode):
                        yield places.get(id(value), ""), value

    def named_entries(self) -> Iterator[tuple[str, tuple[dict[Any, Any], Any, Any]]]:
        """The entries with their places."""
        return zip(self.places, self.entries, strict=True)

    def named_sequences(self) -> Iterator[tuple[str, tuple[Any, list[Any]]]]:
        """The lists with their places."""
        return zip(self.sequence_places, self.sequences, strict=True)

    def number(self, place: str) -> Any:
        """The present number at a place of ``owners``; NaN if there is none any more."""
        holder, key = self.owners[place]
        try:
            if isinstance(holder, types.CellType):
                now = holder.cell_contents
            else:
                now = holder[key] if isinstance(holder, dict | list | deque) else getattr(holder, key)
        except (LookupError, AttributeError, ValueError):
            return math.nan
        return now if is_number(now) else math.nan

    def assign(self, place: str, number: Any) -> None:
        """Set the number at a place of ``owners``."""
        holder, key = self.owners[place]
        if isinstance(holder, types.CellType):
            holder.cell_contents = number
        elif isinstance(holder, dict | list | deque):
            holder[key] = number
        else:
            setattr(holder, key, number)

    def identity(self, tensor: Tensor) -> Hashable:
        """The key of a tensor: its name for those of the model, and otherwise its identity.

        Names, because a parameter that another rank holds is replaced under its name; recurrent layers also keep
        theirs in a list.
        """
        return self.names_of.get(id(tensor), id(tensor))
