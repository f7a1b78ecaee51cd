"""All models of the zoo."""

from .diffusion import DIFFUSION
from .entry import Entry
from .families import FAMILIES
from .language import LANGUAGE
from .layers import LAYERS
from .plain import PLAIN
from .programs import PROGRAMS
from .refused import REFUSED
from .sequences import SEQUENCES
from .vision import VISION

_ALL = (*LANGUAGE, *SEQUENCES, *VISION, *DIFFUSION, *FAMILIES, *PLAIN, *PROGRAMS, *LAYERS, *REFUSED)
ZOO: dict[str, Entry] = {entry.name: entry for entry in _ALL}
"""By name."""
