"""Refuses reuse of a batch that a step writes in place, because a pipeline writes into copies of microbatches.

One process would change the user's tensor: another leaf of the batch that shares its memory would change with it, and
the next step with the same batch would read the changed one. Both are refused.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ...core.capture.values.containers import flatten_batch
from ...core.errors import RequestError


class WrittenBatches:
    """The tensors of batches that steps have written.

    Args:
        written: name of a leaf that the step writes in place → the user's line.
    """

    def __init__(self, written: Mapping[str, str]) -> None:
        self._written = written
        self._given: Any = WeakIdKeyDictionary()

    def add(self, batch: Any) -> None:
        """Record that a step runs on a batch.

        Raises:
            RequestError: it shares memory between a written tensor and another one, or an earlier step wrote it.
        """
        if not self._written:
            return
        leaves, nesting = flatten_batch(batch)
        tensors = {n: x for n, x in zip(nesting.names, leaves, strict=True) if isinstance(x, Tensor) and not x.is_meta}
        for name, line in self._written.items():
            if name not in tensors:
                continue
            tensor, where = tensors[name], tensors[name].untyped_storage().data_ptr()
            for other, held in tensors.items():
                if other != name and held.untyped_storage().data_ptr() == where:
                    raise RequestError(
                        f"{line}: the step writes into {name} in place, whose memory is also that of {other}: a "
                        "pipeline writes into a copy of each microbatch; clone the tensor in the step before it is "
                        "written"
                    )
            if self._given.get(tensor) == tensor._version:
                raise RequestError(
                    f"{line}: the step writes into {name} in place, and an earlier step had the same tensor: in one "
                    "process it would have changed, and a pipeline writes into a copy; clone the tensor in the step "
                    "before it is written"
                )
            self._given[tensor] = tensor._version
