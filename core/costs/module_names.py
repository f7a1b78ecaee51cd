"""Stages in the model's own words: from which module to which they reach.

An operator is called ``module.path/operator``, or ``module.path`` in a file that knows modules alone. A stage is
told by the largest modules that lie in it whole, at its ends: ``transformer.wte … transformer.h.8.attn``.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

Path = tuple[str, ...]

BETWEEN = " … "


def module_ranges(stages: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """For each stage the modules from its first operator to its last.

    Args:
        stages: names of the operators of each stage, all of the model's together.
    """
    whole = Counter(path for names in stages for name in names for path in _enclosing(name))
    return tuple(_range(names, whole) for names in stages)


def _enclosing(name: str) -> list[Path]:
    """The modules around an operator, the outermost first, and the operator itself last."""
    module, slash, operator = name.rpartition("/")
    parts = [part for part in (module if slash else operator).split(".") if part]
    if slash:
        parts.append(f"/{operator}" if parts else operator)
    return list(accumulate(((part,) for part in parts), lambda path, part: path + part))


def _range(names: Sequence[str], whole: Counter[Path]) -> str:
    if not names:
        return "nothing"
    own = Counter(path for name in names for path in _enclosing(name))
    first, last = (
        next(path for path in _enclosing(name) if own[path] == whole[path]) for name in (names[0], names[-1])
    )
    return _text(first) if first == last else f"{_text(first)}{BETWEEN}{_text(last)}"


def _text(path: Path) -> str:
    return ".".join(path).replace("./", "/")
