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

TENTH = (
    "Long skips", "Halting", "ELECTRA", "GRU", "Quantized", "Moving centre", "ALBERT", "VAE", "Checked", "Parametrized",
    "Task of the batch", "Energy", "Flagged task", "PINN", "Packed lengths",
)  # fmt: skip
"""Some that between them show every mechanism: tied weights and a tensor that crosses stages, a module that stays
Python, an end of the step that does, layers taken apart, a backward of one's own, buffers, weights used by several
stages, checks that are left out, computed weights, a value in the batch, refusals, and sizes that depend on values."""
