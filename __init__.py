"""panpipe: automatic pipeline parallelism for PyTorch. One plan, predicted and then run."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_NAMES = {
    "pipeline": "runtimes.pipeline",
    "Plan": "core.plan",
}
"""The public face: each name and the module that defines it. Loaded on first use, so that commands which do not
need torch start without it, and so that pytest may import this file under another name."""

__all__ = sorted(_NAMES)  # noqa: PLE0605 - a list of str

if TYPE_CHECKING:
    from .core.plan import Plan as Plan
    from .runtimes.pipeline import pipeline as pipeline


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'panpipe' has no attribute '{name}'; it has {', '.join(__all__)}")
    return getattr(import_module(f".{_NAMES[name]}", __name__), name)
