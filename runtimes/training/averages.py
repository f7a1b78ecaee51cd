"""Averages of the weights over training (EMA), and calls of the user's function for every parameter of this process."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import RequestError
from ..update.stage_state import StageState
from .local_stages import LocalStages
from .ownership import held_here, update_copies

AverageFunction = Callable[[Tensor, Tensor, int], Tensor]
"""The new average, from the average, the parameter, and the number of updates before: ``avg_fn`` of torch's
AveragedModel."""
Visit = Callable[[str, nn.Parameter], Any]
"""Called with the name of a parameter and the parameter."""


class WeightAverage:
    """The average of all parameters over the updates of a pipeline; `panpipe.weights.ema` creates one.

    It starts with the current values of the parameters. Every update that is not skipped changes it:
    ``average.lerp_(parameter, 1 - decay)``, as ``torch.optim.swa_utils.get_ema_multi_avg_fn`` does.

    Args:
        owner: all averages of the pipeline.
        decay: of the average.
        buffers: whether floating-point buffers are averaged, and others copied; otherwise evaluation uses the model's.
        function: computes the average, instead of ``decay``.

    Attributes:
        decay: of the average.
        updates: number of updates in the average.
        tensors: the averages of the parameters and buffers of this process, by name.
    """

    def __init__(self, owner: "Averages", decay: float, buffers: bool, function: AverageFunction | None) -> None:
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay <= 1:
            raise RequestError(f"decay is {decay!r}: the share of the average that stays is a number from 0 to 1")
        if function is not None and not callable(function):
            raise RequestError(f"function is {function!r}: give a function (average, parameter, updates) -> average")
        self.decay, self.updates = float(decay), 0
        self._owner, self._buffers, self._function = owner, buffers, function
        with owner.stages.whole_parameters():
            self.tensors = {name: tensor.detach().clone() for name, tensor in self._sources().items()}

    def _sources(self) -> dict[str, Tensor]:
        """The averaged tensors by name: those that this process holds."""
        return held_here(self._owner.stages.model, self._buffers)

    def update(self) -> None:
        """Update the average with the current values of the parameters."""
        averages, sources = [], []
        with torch.no_grad():
            for name, source in self._sources().items():
                average = self.tensors[name]
                if not (source.is_floating_point() or source.is_complex()):
                    average.copy_(source)
                elif self._function is not None:
                    average.copy_(self._function(average, source.detach(), self.updates))
                else:
                    averages.append(average)
                    sources.append(source.detach())
            if averages:
                torch._foreach_lerp_(averages, sources, 1 - self.decay)
        self.updates += 1

    def follow(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue with the stages of another plan; see `Averages.follow`."""
        self.tensors = {name: tensors[name] for name in self._sources()}

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the model computes with the averages, for evaluation. Every rank enters it.

        Training is refused within. Afterwards the parameters have the same bits as before.
        """
        owner = self._owner
        owner.refuse_closed()
        owner.refuse_applied("apply an average")
        owner.applied = True
        with owner.stages.whole_parameters():
            self._swap()
            try:
                yield
            finally:
                self._swap()
                owner.applied = False

    def save(self, folder: str | Path) -> None:
        """Write the averages as `Pipeline.save` writes the weights: for ``weights=folder``. Every rank calls this."""
        with self.applied():
            self._owner.save(folder)

    def _swap(self) -> None:
        with torch.no_grad():
            for name, source in self._sources().items():
                average = self.tensors[name]
                value = source.detach().clone()
                source.copy_(average)
                average.copy_(value)
        update_copies(self._owner.stages.model, self._owner.stages.states)


class Averages:
    """The averages of the weights of one pipeline.

    Args:
        save: writes the weights; see `Pipeline.save`.
        refuse_closed: raises an error if the pipeline is closed.

    Attributes:
        all: in order of creation.
        applied: whether parameters have the values of one of them.
    """

    def __init__(
        self, stages: LocalStages, save: Callable[[str | Path], None], refuse_closed: Callable[[], None]
    ) -> None:
        self.stages, self.save, self.refuse_closed = stages, save, refuse_closed
        self.all, self.applied = list[WeightAverage](), False

    def add(self, decay: float, buffers: bool, function: AverageFunction | None) -> WeightAverage:
        """Start a new average; see `panpipe.weights.ema`."""
        average = WeightAverage(self, decay, buffers, function)
        self.all.append(average)
        return average

    def update(self) -> None:
        """Update all averages, after an update of the parameters."""
        if self.all:
            with self.stages.whole_parameters():
                for average in self.all:
                    average.update()

    def follow(self, stages: LocalStages, tensors: Sequence[Mapping[str, Tensor]]) -> None:
        """Continue with the stages of another plan.

        Args:
            tensors: of each average, the averages of what this process holds now, and possibly more.
        """
        self.stages = stages
        for average, own in zip(self.all, tensors, strict=True):
            average.follow(own)

    def refuse_applied(self, what: str) -> None:
        """Refuse an operation while parameters have the values of an average.

        Raises:
            RequestError: they have.
        """
        if self.applied:
            raise RequestError(
                f"the model has the values of an average: to {what}, end the block `with ema.applied()` first"
            )


def visit_parameters(
    model: nn.Module, states: Mapping[int, StageState], function: Visit, key: tuple[int, ...]
) -> dict[str, Any]:
    """Call a function with every parameter that this process holds.

    Each parameter has its own stream of random numbers, so that every process that holds it draws the same.

    Args:
        function: called with name and parameter, under ``no_grad``; it may change the parameter in place.

    Returns:
        Name → return value of the function.
    """
    found: dict[str, Any] = {}
    here = held_here(model)
    for name, parameter in model.named_parameters():
        if name not in here:
            continue
        devices = [parameter.device] if parameter.device.type == "cuda" else []
        seed = int.from_bytes(blake2b(f"{key}{name}".encode(), digest_size=8).digest(), "little") >> 1
        with torch.random.fork_rng(devices), torch.no_grad():
            torch.manual_seed(seed)
            found[name] = function(name, parameter)
    update_copies(model, states)
    return found
