"""The origin of a source file, by its path: it decides which lines messages name and which values are compared.

own project, a notebook, ``python -c``            USER       lines are named; values that its code reads are compared
another installed package, such as transformers   LIBRARY    the same, except for its modules' global variables
torch's modules, optimizers, distributions        LAYERS     not named; values that their code reads are compared
Python, the rest of torch, panpipe                INTERNAL   neither
"""

import enum
import functools
import os
import sysconfig
from pathlib import Path

import torch

_TORCH = str(Path(torch.__file__).parent) + os.sep
_LAYERS = tuple(_TORCH + os.path.join(*parts) + os.sep
                for parts in (("nn", "modules"), ("nn", "utils"), ("optim",), ("distributions",)))  # fmt: skip
_BASE = tuple(_TORCH + os.path.join("nn", "modules", name) for name in ("module.py", "container.py"))
_INSTALLED = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)
_STANDARD = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")})
_ROOTS = {Path(__file__).parents[3], Path(__file__).resolve().parents[3]}  # they differ through a symbolic link
_FOLDERS = ("core", "runtimes", "simulators", "backends", "answers", "cli", "explore", "integrations")
_OWN = tuple(str(root / name) + os.sep for root in _ROOTS for name in _FOLDERS)
_OWN_FILES = tuple(str(root / name) for root in _ROOTS for name in ("__init__.py", "api.py", "simulator_target.py"))


class Origin(enum.Enum):
    """The origin of a file; see the module."""

    USER = "user"
    LIBRARY = "library"
    LAYERS = "layers"
    INTERNAL = "internal"


@functools.lru_cache(maxsize=1 << 12)
def origin_of(file: str) -> Origin:
    """The origin of a file.

    Args:
        file: its path, or the text that a code object has instead, such as "<stdin>".
    """
    if file.startswith("<frozen") or is_own(file):
        return Origin.INTERNAL
    if file.startswith(_TORCH):
        return Origin.LAYERS if file.startswith(_LAYERS) and file not in _BASE else Origin.INTERNAL
    if any(folder in file for folder in _INSTALLED):
        return Origin.LIBRARY
    return Origin.INTERNAL if file.startswith(_STANDARD) else Origin.USER


def is_own(file: str) -> bool:
    """Whether a file is part of panpipe."""
    return file.startswith(_OWN) or file in _OWN_FILES


def is_users_own(file: str) -> bool:
    """Whether a file is part of the user's own project, and not of an installed package."""
    return origin_of(file) is Origin.USER


@functools.lru_cache(maxsize=1 << 12)
def is_user_code(file: str) -> bool:
    """Whether messages name lines of a file: it is part of the user's project, or of a model library.

    Generated code, such as a dataclass's methods, has no file.
    """
    return not file.startswith("<") and origin_of(file) in (Origin.USER, Origin.LIBRARY)
