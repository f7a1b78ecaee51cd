"""Prepared steps by the Python values that the step reads: when one changes, the step is captured again.

    current values ──▶ known? ──▶ its programs
                         └─ no ──▶ captured again, the plan's cut carried over          (shapes.py)

A return to earlier values captures nothing. Ranks whose values changed compare the changes before they continue: a rank
that captures alone would wait for the others.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from attrs import define
from torch import nn

from ...core.capture.python.guards import Guards
from ...core.errors import RequestError
from ...core.logs import LOGGER
from ..batch.batch_agreement import BatchAgreement, ChangedValues
from ..batch.lru_cache import LruCache
from ..batch.microbatches import Microbatch
from ..batch.shapes import Shapes
from ..engine.prepared import Prepared, PreparedSteps

KEPT = 8
"""Number of variants of a step whose programs are kept, each for several shapes."""

Make = Callable[[Hashable], tuple[Shapes, PreparedSteps]]
"""Creates the caches of one variant's programs and prepared steps, from a key of its Python values."""
Agree = Callable[[bool, ChangedValues | None], BatchAgreement]
"""Starts to compare a batch between ranks: whether its programs are known here, and which value changed."""


@define(eq=False)
class _Variant:
    """The step with certain Python values.

    Args:
        reads: the values.
        shapes, prepared: its programs and prepared steps.
        ready: whether a capture with these values has succeeded.
    """

    reads: Guards
    shapes: Shapes
    prepared: PreparedSteps
    ready: bool = False


class Variants:
    """Prepared steps by the Python values that the step reads.

    Args:
        model: the user's module.
        step: the user's function.
        make: creates the caches of one variant.
        changed: called when something of the model changed, before its values are read again.
    """

    def __init__(self, model: nn.Module, step: Any, make: Make, changed: Callable[[], None] = lambda: None) -> None:
        self._model, self._step, self._make, self._changed = model, step, make, changed
        self._kept: LruCache[Hashable, _Variant] = LruCache(KEPT)
        reads = Guards(model, step)
        self._now = _Variant(reads, *make(reads.key), ready=True)
        self._kept.keep(self._now.reads.key, self._now)
        self._reported: set[str] = set()

    @property
    def key(self) -> Hashable:
        """A key of the Python values that the step reads now."""
        return Guards(self._model, self._step).key

    @property
    def prepared(self) -> PreparedSteps:
        """The prepared steps of the variant that was used last."""
        return self._now.prepared

    @property
    def shapes(self) -> Shapes:
        """The programs of the variant that was used last."""
        return self._now.shapes

    def of(self, pieces: Sequence[Microbatch], agree: Agree) -> tuple[Prepared, BatchAgreement, str | None]:
        """The prepared step of these microbatches, with the current values.

        Args:
            pieces: the microbatches.
            agree: starts to compare this batch between ranks.

        Returns:
            The prepared step, the comparison, and a line for the user if a shape is new.

        Raises:
            RequestError: the step cannot be captured with these values, or the plan cannot run it, or another rank has
                another batch or other values.
        """
        if self._now.reads.unchanged():
            kept = self._now.prepared
            agreement = agree(kept.known(pieces), None)
            prepared, remark = kept.of(pieces, agreement)
            return prepared, agreement, remark
        self._changed()
        reads, before = Guards(self._model, self._step), self._now
        found = self._kept.use(reads.key)
        if found is None:
            found = _Variant(reads, *self._make(reads.key))
        found.reads = reads  # equal values, but they may be other objects
        places = list(reads.others(before.reads))
        place = places[0] if places else None
        change = None if place is None else ChangedValues(reads.digest(places), _change(place, before.reads, reads))
        agreement = agree(change is None and found.prepared.known(pieces), change)
        if change is not None:
            agreement.refuse_before_run()
        try:
            prepared, remark = found.prepared.of(pieces, agreement)
        except RequestError as error:
            if found.ready or place is None:
                raise
            raise RequestError(
                f"{_change(place, before.reads, reads)}, and the step captured again: {error}"
            ) from error
        self._now = found
        if found.ready:
            return prepared, agreement, remark
        found.ready = True
        self._kept.keep(found.reads.key, found)
        if place is not None and place not in self._reported:
            self._reported.add(place)
            LOGGER.warning(
                "%s: the step is captured again for each new value, and programs are kept for %d: if it often changes, "
                "give it with the batch as a tensor, or make it a buffer", _change(place, before.reads, reads), KEPT,
            )  # fmt: skip
        return prepared, agreement, remark

    def forget(self) -> None:
        """Drop all prepared steps; after a failed step, which leaves messages and saved tensors in them."""
        for key in self._kept:
            variant = self._kept.use(key)
            assert variant is not None
            variant.prepared.forget()


def _change(place: str, before: Guards, now: Guards) -> str:
    return f"{now.line(place)}: the step reads '{place}', which was {before.text(place)} and is {now.text(place)}"
