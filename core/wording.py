"""Texts for messages: counts, lists of names, shapes, modules."""

from collections.abc import Iterable, Sequence


def counted(count: int, noun: str) -> str:
    """A count with its noun: ``1 device``, ``2 devices``, ``2 microbatches``."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{'' if count == 1 else plural}"


def first_of(names: Sequence[str], shown: int = 1) -> str:
    """The first of several names and the number of the others: ``wte.weight and 3 more``."""
    more = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {more} more" if more > 0 else "")


def shape_text(shape: Iterable[int]) -> str:
    """A shape: ``8×3×224``, or ``scalar`` for one without dimensions."""
    return "×".join(map(str, shape)) or "scalar"


def value_text(value: object) -> str:
    """A value of a wrong type: its representation if that is short and no address, otherwise its type."""
    text = " ".join(repr(value).split())
    if len(text) <= 60 and " at 0x" not in text:
        return text
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'AEIOaeio' else 'a'} {kind}"


def module_text(name: str) -> str:
    """A module by its qualified name: ``module 'h.0.attn'``, or ``the model`` for the root."""
    return f"module '{name}'" if name else "the model"
