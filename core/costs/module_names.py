"""Names stages by the model's modules: the first and the last module of each.

An operator's name is ``module.path/operator``, or ``module.path`` in a file with modules only. A stage's name has the
largest modules at its two ends that are completely inside it: ``transformer.wte … transformer.h.8.attn``.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

Path = tuple[str, ...]

BETWEEN = " … "


def module_ranges(stages: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """For each stage the modules from its first operator to its last.

    Args:
        stages: names of the operators of each stage; together all operators of the model.
    """
    whole = Counter(path for names in stages for name in names for path in _enclosing(name))
    return tuple(_range(names, whole) for names in stages)


def _enclosing(name: str) -> list[Path]:
    """The modules that contain an operator, from the outermost, and the operator itself last."""
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
