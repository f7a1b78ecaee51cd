"""The example of a pipeline: the user's model and step, and the microbatch that the step was captured for.

A captured step has the modes of the modules, training or evaluation, of its capture.
"""

from functools import partial
from typing import Any

from attrs import field, frozen
from torch import nn

from ...core.capture.batch.batch_dims import enlarged, place_samples, read_dynamic
from ...core.capture.batch.find_batch_dims import RowTrace, find_samples
from ...core.capture.export.operators import Operators, operators_of
from ...core.capture.export.step import capture_step, symbolic_sizes
from ...core.capture.graph.sizes import NotSymbolic
from ...core.capture.regions.breaks import StepFunction
from ...core.capture.values.user_lines import reason_of
from ...core.errors import RequestError
from ...core.logs import LOGGER
from ..microbatches import Microbatch, Shape, split_batch
from .shapes import VaryingSizes, sizes_of


@frozen
class Example:
    """A step captured for the largest microbatch of an example batch.

    Args:
        step: ``step(model, microbatch)``.
        microbatch: the microbatch that the step was captured for, with real data.
        trace: of the step with another number of samples; None if it cannot be traced.
        varying: the sizes that differ between batches, for all plans.
    """

    model: nn.Module
    step: StepFunction
    microbatch: Microbatch
    operators: Operators
    trace: RowTrace | None = field(default=None, eq=False)
    varying: VaryingSizes = field(factory=VaryingSizes, eq=False)

    @classmethod
    def capture(
        cls,
        model: nn.Module,
        step: StepFunction,
        batch: Any,
        microbatches: int,
        batch_dims: Any,
        device_type: str,
        traced: bool = True,
        dynamic: Any = None,
    ) -> "Example":
        """Cut a batch, and capture the step for its largest microbatch.

        Args:
            microbatches: number of microbatches that it is cut into.
            batch_dims: the dimension of each tensor that has the samples; 0 where it is not given.
            device_type: of the devices that the step is captured for.
            traced: whether the step may be traced with another number of samples; parts of tensor ranks communicate.
            dynamic: the dimensions that vary, and their largest sizes, for which the step is planned.

        Raises:
            RequestError: the batch cannot be cut, or the step cannot be captured.
        """
        varying = VaryingSizes(read_dynamic(dynamic, batch))
        batch = enlarged(batch, varying.declared)
        if traced:
            dims, trace = find_samples(model, step, batch, given=batch_dims, microbatches=microbatches)
        else:
            dims, trace = place_samples(batch, batch_dims, microbatches), None
        largest = split_batch(batch, microbatches, dims)[0]
        capture = partial(capture_step, model, step, largest.batch, device=device_type)
        symbols = varying.of(largest.shape)
        if symbols:
            try:
                with symbolic_sizes(parts=not traced):
                    symbolic = operators_of(capture(symbolic=symbols))
                    found = symbolic.step.sizes
                    sizes = None if found is None else found.values(sizes_of(largest.shape))
                    if sizes is None:
                        raise NotSymbolic("the step fixes them, as a loop over a sequence does")
                    operators = symbolic.with_sizes(sizes)
            except Exception as error:  # the capture with numbers raises the user's
                operators = operators_of(capture())
                LOGGER.warning(
                    "the step is captured for each size, because those in dynamic= cannot be symbols: %s",
                    reason_of(error),
                )
        else:
            operators = operators_of(capture())
        for set_flag in operators.step.flags:  # as after a first step in eager: a configuration that is saved has them
            set_flag()
        return cls(model, step, largest, operators, trace, varying)

    @property
    def shape(self) -> Shape:
        """The shape of the microbatch."""
        return self.microbatch.shape

    @property
    def read_tensors(self) -> list[str]:
        """Names of the parameters and buffers that the step reads, each once."""
        buffers = self.operators.step.buffers
        read = [buffers[node.name] for node in self.operators.step.graph.nodes if node.name in buffers and node.users]
        return list(dict.fromkeys([*self.operators.graph.parameters, *read]))


Modes = tuple[bool, ...]
"""For every module whether it is in training mode."""


class ModuleModes:
    """The modes of a model's modules at the creation of this object."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._then = self.now()

    def now(self) -> Modes:
        """The current modes."""
        return tuple(module.training for module in self._modules.values())

    def first_other(self, one: Modes, other: Modes) -> str | None:
        """Name of the first module whose mode differs between the two; None if none does."""
        found = zip(self._modules, one, other, strict=True)
        return next((name for name, here, there in found if here is not there), None)

    def refuse_other_mode(self) -> None:
        """Refuse to train a model that is in the other mode as a whole, as after an evaluation without ``train()``.

        Modes of single modules may change, as where BatchNorm is frozen later: the step is captured again for them.

        Raises:
            RequestError: the model's mode has changed.
        """
        then, now = self._then[0], self.now()[0]
        if then is not now:
            words = {True: "training", False: "evaluation"}
            raise RequestError(
                f"the model is in {words[now]} mode and was captured in {words[then]} mode: a pipeline trains in the "
                "mode that its model had; restore it, as model.train() does after an evaluation, or build another "
                "pipeline"
            )
