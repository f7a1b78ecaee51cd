"""Writes a catalogue file of one device and one link: measured numbers that override those of another entry."""

import json
from collections.abc import Mapping

from ..sourced import Source
from .catalogue import FORMAT

Numbers = Mapping[str, tuple[float, Source]]
"""Number and source by dotted name, the names as in ``DeviceType.sources``."""


def device_file(name: str, like: str, title: str, numbers: Numbers, link: Numbers | None = None) -> str:
    """The text of a catalogue file (TOML).

    Args:
        name: name of the device.
        like: the catalogue entry that all other numbers are inherited from.
        title: a name for display.
        numbers: those that differ from the entry's.
        link: numbers of a link type ``NAME-link`` between two such devices.
    """
    lines = [f'format = "{FORMAT}"', "", f"[devices.{_text(name)}]", f"like = {_text(like)}", f"title = {_text(title)}"]
    if link is not None:
        lines += [f"host_link = {_text(f'{name}-link')}", f"host_copy = {_text(f'{name}-link')}"]
    lines += [_line(key, *number) for key, number in numbers.items() if "." not in key]
    for table in dict.fromkeys(key.partition(".")[0] for key in numbers if "." in key):
        lines += ["", f"[devices.{_text(name)}.{table}]"]
        lines += [
            _line(key.partition(".")[2], *number) for key, number in numbers.items() if key.startswith(f"{table}.")
        ]
    if link is not None:
        lines += ["", f"[links.{_text(f'{name}-link')}]", f"title = {_text(f'Between two of {title}')}"]
        lines += [_line(key, *number) for key, number in link.items()]
    return "\n".join(lines) + "\n"


def _line(key: str, value: float, source: Source) -> str:
    return f"{key} = {{ value = {value:.4g}, {'assumed' if source.assumed else 'source'} = {_text(source.text)} }}"


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)  # a JSON string is a basic string of TOML
