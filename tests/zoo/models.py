"""All models of the zoo."""

from .diffusion import DIFFUSION
from .entry import Entry
from .language import LANGUAGE
from .plain import PLAIN
from .sequences import SEQUENCES
from .vision import VISION

ZOO: dict[str, Entry] = {entry.name: entry for entry in (*LANGUAGE, *SEQUENCES, *VISION, *DIFFUSION, *PLAIN)}
"""By name."""

TENTH = ("Long skips", "Halting", "ELECTRA", "GRU", "Quantized", "Moving centre", "DenseNet", "ALBERT")
"""Some that between them show every mechanism: tied weights and a tensor that crosses stages, a module that stays
Python, an end of the step that does, layers taken apart, a backward of one's own, buffers, BatchNorm, weights used by
several stages."""
