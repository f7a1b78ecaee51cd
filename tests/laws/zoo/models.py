"""All models of the zoo, by name. A look-up imports no library that other models need."""

from collections.abc import Iterator, Mapping
from importlib import import_module

from .entry import Entry

MODULES = (
    "language", "sequences", "vision", "diffusion", "families", "plain", "programs", "layers", "refused",
)  # fmt: skip
"""Each has a tuple of entries that is called as it is; in the order of the table."""
SEARCHED = (
    "plain", "programs", "layers", "refused", "language", "sequences", "vision", "families", "diffusion",
)  # fmt: skip
"""Those that need torch alone come first, then transformers, then diffusers."""


class Zoo(Mapping[str, Entry]):
    """The models of these modules, which are imported one after another until a name is found."""

    def __init__(self) -> None:
        self._entries: dict[str, dict[str, Entry]] = {}

    def __getitem__(self, name: str) -> Entry:
        for module in SEARCHED:
            if name in (entries := self._of(module)):
                return entries[name]
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for module in MODULES for name in self._of(module))

    def __len__(self) -> int:
        return sum(len(self._of(module)) for module in MODULES)

    def _of(self, module: str) -> dict[str, Entry]:
        if module not in self._entries:
            found = getattr(import_module(f"{__package__}.{module}"), module.upper())
            self._entries[module] = {entry.name: entry for entry in found}
        return self._entries[module]


ZOO = Zoo()
