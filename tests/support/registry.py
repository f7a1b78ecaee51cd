"""Functions collected under their names, as the cases of a test."""

from collections.abc import Callable
from typing import Any

Make = Callable[[], Any]


class Registry(dict[str, Make]):
    """Cases by name; used as a decorator of what makes one."""

    def __call__(self, make: Make) -> Make:
        assert make.__name__ not in self, f"two cases are called {make.__name__}"
        self[make.__name__] = make
        return make

    def of(self, make: Callable[[type], Any]) -> Callable[[type], type]:
        """A decorator of classes, each of which is a case: what ``make`` makes of it."""

        def registered(cls: type) -> type:
            self[cls.__name__] = lambda: make(cls)
            return cls

        return registered
