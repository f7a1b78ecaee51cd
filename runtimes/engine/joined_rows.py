"""The return value of a function for a whole batch: the rows of its microbatches, joined in order.

microbatch   0      1      2
computed   ┌─────┬─────┬─────┐  one tensor for the batch, allocated before anything runs; each result
or received│     │     │     │  is copied to its rows when it is computed or received
           └─────┴─────┴─────┘
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...backends.kind import dtype_name
from ...core.capture.graph.outputs import RowOutputs
from ...core.errors import RequestError
from ..batch.microbatches import Microbatch
from ..launch.team import Team
from ..programs.compiled import Compiled
from .prepared import Prepared


class JoinedRows:
    """The results of a function, in this process.

    Args:
        prepared: the step.
        pieces: its microbatches.
        team: the devices.
        where: device of this process → its torch device.
        everywhere: whether every process gets the results; otherwise only those that compute them, and the others get
            None.

    Raises:
        RequestError: the results of two microbatches differ in dtype, or in shape beyond their rows.
    """

    def __init__(
        self,
        prepared: Prepared,
        pieces: Sequence[Microbatch],
        team: Team,
        where: Mapping[int, torch.device],
        everywhere: bool,
    ) -> None:
        outputs = [_outputs(each) for each in prepared.compiled]
        self._outputs, self._here, self._everywhere = outputs[0], team.local, everywhere
        self._devices = team.size
        ends = [0, *accumulate(piece.samples for piece in pieces)]
        self._places: dict[tuple[str, int], list[tuple[Tensor, int]]] = {}
        self._sources: dict[int, list[Tensor]] = {device: [] for device in range(self._devices)}
        self._whole: list[Tensor | None] = []
        placement = prepared.plan.placement
        for number, first in enumerate(outputs[0].values):
            self._whole.append(None)
            if first is None:
                continue
            names = [str(each.values[number]) for each in outputs]
            devices = [placement[c.stage_of(name)] for c, name in zip(prepared.compiled, names, strict=True)]
            if not everywhere and not set(devices) & set(team.local):
                continue
            like = [c.operators.values[name] for c, name in zip(prepared.compiled, names, strict=True)]
            dim = outputs[0].dims[number]
            _check_alike([tensor.movedim(dim, 0) for tensor in like], pieces)
            local = next((device for device in devices if device in team.local), team.local[0])
            rest = like[0].movedim(dim, 0).shape[1:]
            whole = torch.empty((ends[-1], *rest), dtype=like[0].dtype, device=where[local])
            self._whole[number] = whole
            for m, (name, device) in enumerate(zip(names, devices, strict=True)):
                rows = whole[ends[m] : ends[m + 1]]
                self._places.setdefault((name, m), []).append((rows, dim))
                self._sources[device].append(rows)

    def store(self, name: str, microbatch: int, value: Tensor) -> bool:
        """Copy a result to its rows. Returns true: nothing else needs it."""
        for rows, dim in self._places.get((name, microbatch), ()):
            rows.copy_(value.movedim(dim, 0))
        return True

    def sent_by(self, device: int) -> list[Tensor]:
        """The rows that a device computes and sends to all others; empty if no other process gets them."""
        return self._sources[device] if self._everywhere and len(self._here) < self._devices else []

    def result(self) -> Any:
        """The function's return value for the whole batch, with its nesting."""
        found = [
            whole.movedim(0, dim).contiguous() if whole is not None and dim else whole
            for whole, dim in zip(self._whole, self._outputs.dims, strict=True)
        ]
        return pytree.tree_unflatten(found, self._outputs.nesting)


def _outputs(compiled: Compiled) -> RowOutputs:
    outputs = compiled.operators.step.outputs
    assert isinstance(outputs, RowOutputs)
    return outputs


def _check_alike(like: Sequence[Tensor], pieces: Sequence[Microbatch]) -> None:
    """Check that the results of all microbatches have one dtype, and one shape beyond dimension 0, their rows."""
    for other, piece in zip(like, pieces, strict=True):
        if other.shape[1:] != like[0].shape[1:] or other.dtype != like[0].dtype:
            raise RequestError(
                f"the function returns {_text(like[0])} for {pieces[0].samples} samples and {_text(other)} for "
                f"{piece.samples}: results that are joined need one shape beyond their rows; pad them"
            )


def _text(tensor: Tensor) -> str:
    return f"{'×'.join(map(str, tensor.shape))} of {dtype_name(tensor.dtype)}"
