"""Plug-ins of other packages, through entry points: schedules, devices, backends."""

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from attrs import frozen

from .errors import RequestError


@frozen
class LeftOut:
    """A plug-in that cannot be used.

    Args:
        group: of its entry point, such as ``panpipe.schedules``.
    """

    group: str
    name: str
    value: str
    reason: str

    def __str__(self) -> str:
        kind = self.group.removeprefix("panpipe.").removesuffix("s")
        return f"{kind} plug-in '{self.name}' ({self.value}) is left out: {self.reason}"


def load_plugins(group: str, add: Callable[[Any], None]) -> tuple[LeftOut, ...]:
    """Load every plug-in of a group, sorted by name. A plug-in that cannot be used does not prevent others.

    Args:
        add: called with the object of each entry point; raises RequestError with the reason if it is a wrong one.

    Returns:
        The plug-ins that raise or call ``sys.exit`` while they are loaded, and those that ``add`` refuses.
    """
    left_out = []
    for point in sorted(entry_points(group=group), key=lambda point: (point.name, point.value)):
        try:
            add(point.load())
        except RequestError as error:
            left_out.append(LeftOut(group, point.name, point.value, str(error)))
        except (Exception, SystemExit) as error:  # a module may call sys.exit where it finds no driver
            left_out.append(LeftOut(group, point.name, point.value, f"loading it failed with {error!r}"))
    return tuple(left_out)
