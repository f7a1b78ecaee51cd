"""Finds where a step needs a tensor's value during capture, and the regions that stay Python because of it.

A capture is attempted. If Python needs a value, the innermost module that needs it becomes a region, or, outside of
every module, the rest of the step does; then the capture is attempted again. What regions return is observed in one run
of the step on the example, with real tensors.
"""

from collections.abc import Callable
from typing import Any

import numpy
import torch
from attrs import define, field
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree

from ...errors import RequestError
from ...tensor_metadata import memory_of
from ..graph.randomness import KeyedRandom, random_key
from ..graph.rewrites import late_checks_dropped
from ..python.changes import Changes
from ..python.guards import Guards
from ..python.parameters import RequiresGradWrites
from ..python.torch_settings import Autocasts
from ..values.capture_errors import LateSize, NeedsAutograd, NeedsValue, depends_on_value, error_of_type
from ..values.containers import plain_result
from ..values.fake_tensors import stand_in_for
from ..values.late_numbers import LateNumber, with_late_numbers_as_tensors
from ..values.printed import Held, output_held
from ..values.user_lines import first_line, reason_of
from ..values.value_watch import KnownValues, ValueWatch, are_constants, unknown_masks_taken
from .module_regions import ModuleRegions
from .tail import Recorder, TailRegion, numbered

StepFunction = Callable[[nn.Module, Any], Any]

_STAND_INS = 1 << 30
"""Largest number of bytes of a model's missing values that are replaced by random numbers while its step is observed.
"""


@define(eq=False)
class Breaks:
    """The regions of a step.

    Args:
        model, step, batch: the user's; the batch has real tensors.

    Attributes:
        sizes: whether sizes that depend on values count as values.
        printed: what the last run of the step prints and logs.
        assigned: names of the buffers that it assigns.
        guards: the values that the step's code names, before it runs.
        changes: what its runs change.
        trained: name of a parameter → whether it requires a gradient when the step begins.
        loss: whether the step returns a loss, possibly in an object.
        autocasts: active around the capture, in which the step runs.
        as_eager: whether ``torch.compiler.is_exporting`` is false for the step's Python.
        drawn: given to `ValueWatch`.
        kept: fake modes of earlier runs → the name of a value that they kept; see `ValueWatch`.
        known: the values of the last run that follow from numbers and sizes.
    """

    model: nn.Module
    step: StepFunction
    batch: Any
    sizes: bool = False
    printed: Held = field(factory=dict)
    assigned: set[str] = field(factory=set)
    as_eager: bool = False
    loss: bool = True
    autocasts: Autocasts = field(factory=Autocasts.now)
    drawn: int | None = None
    kept: dict[Any, str] = field(factory=dict)
    known: KnownValues = field(factory=KnownValues)
    guards: Guards = field(init=False)
    changes: Changes = field(init=False)
    trained: dict[str, bool] = field(factory=dict)
    _modules: ModuleRegions = field(init=False)
    _tail: TailRegion | None = None
    _names: list[str] = field(factory=list)
    _meta: bool = False
    _constants: dict[int, Tensor] = field(factory=dict)
    _watch: ValueWatch | None = None
    _modes: set[Any] = field(factory=set)
    _causes: dict[str, str] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.guards = Guards(self.model, self.step)
        self.changes = Changes(self.guards, self.is_constant)
        self._modules = ModuleRegions(self.model)
        self._meta = any(tensor.is_meta for _, tensor in self._state())

    @property
    def lines(self) -> dict[str, str]:
        """The regions: a module's name, or "" for the tail of the step → the line that needs a value there."""
        return {**self._modules.lines, **({"": self._tail.line} if self._tail is not None else {})}

    @property
    def causes(self) -> dict[str, str]:
        """The regions, as in ``lines`` → the reason why the line cannot be captured."""
        return {name: self._causes[line] for name, line in self.lines.items() if line in self._causes}

    def run(self, model: nn.Module, batch: Any) -> Any:
        """Run the step with captured tensors.

        Returns:
            Its result with tensors for late numbers.

        Raises:
            NeedsValue: a value is needed outside of the present regions.
        """
        tail, regions = self._tail, list(self._modules.lines)
        self.close()
        self.known = KnownValues()
        watch = self._watch = ValueWatch(self.sizes, self._constants, self.known, self.kept, self.drawn)
        self._constants.update({memory_of(buffer): buffer for buffer in model.buffers()})
        recorder = Recorder()
        result = None
        with (
            output_held() as printed, late_checks_dropped(), unknown_masks_taken(),
            RequiresGradWrites(model, self.trained) as writes, watch,
            self._modules.called(model, self._meta), numbered(model, regions, recorder),
        ):  # fmt: skip
            try:
                result = self._called(model, batch)
                watch.refuse_read_texts(result)
            except Exception as error:
                if not depends_on_value(error):
                    raise
                self._names = recorder.names
                if tail is None and isinstance(error, NeedsValue):
                    raise
                if tail is None:
                    raise NeedsValue(str(error)) from error
                _leave_modules(error)
        self._modes |= {leaf.fake_mode for leaf in pytree.tree_leaves(batch) if isinstance(leaf, FakeTensor)}
        if result is not None:  # the step ran to its end
            writes.check_ends()
        if tail is not None:
            self.printed = {}  # the tail prints when it runs
            return tail.call(self.model, self._called, regions, model, batch, recorder)
        self._refuse_result(result, trained=False)
        self.printed = printed
        return with_late_numbers_as_tensors(result)

    def is_constant(self, value: Any) -> bool:
        """Whether a value is the same in each run: no tensor of it depends on the batch, a parameter or a random
        number."""
        return are_constants(value, self._constants)

    def again(self, name: str) -> None:
        """Prepare another run, which may not compute with what the runs so far kept in Python.

        Args:
            name: of a value that they kept; "" without one.
        """
        self.kept.update(dict.fromkeys(self._modes, name))
        self.close()
        self.changes.following = True

    def close(self) -> None:
        """End the last run: no later one, nor another capture, may compute with the numbers that it left in Python."""
        if self._watch is not None:
            self._watch.over = True

    def _called(self, model: nn.Module, batch: Any) -> Any:
        """Call the step; return its result."""
        result = self.step(model, batch)
        return plain_result(result) if self.loss else result

    def _refuse_result(self, result: Any, trained: bool) -> None:
        """Refuse a step that returns a number in place of a loss, or a loss that depends on no parameter, such as one
        made from a number.

        Args:
            result: of a run.
            trained: whether the run was one with values, in which parameters require gradients.
        """
        loss = result[0] if isinstance(result, tuple | list) and result else result
        if self.loss and isinstance(loss, LateNumber | int | float | numpy.ndarray | numpy.generic):
            what = "an array" if isinstance(loss, numpy.ndarray) else "a number"
            raise RequestError(
                f"{first_line(self.step)}: the step returns {what} and not a scalar loss: return the tensor that "
                "backward starts from, without .item(), float() or .numpy()"
            )
        if trained and self.loss and torch.is_grad_enabled() and isinstance(loss, Tensor) and not loss.requires_grad:
            raise RequestError(
                f"{first_line(self.step)}: the loss that the step returns has no gradient: there is nothing to train; "
                "check requires_grad, and return the tensor that was computed from the model, without .detach(), "
                ".item() or no_grad"
            )

    # After capture stopped

    def begin_as_eager(self) -> None:
        """Start again, with ``torch.compiler.is_exporting`` false for the step's Python."""
        self.as_eager, self.sizes, self._modules, self._tail = True, False, ModuleRegions(self.model), None

    def widen(self, error: BaseException, line: str) -> None:
        """Add the region that contains the need for a value.

        Args:
            error: the error that stopped capture.
            line: the user's line that needed the value.

        Raises:
            RequestError: no region is possible, or its results cannot be observed.
        """
        stopped = error_of_type(NeedsValue, error)
        self._causes[line] = str(stopped) if stopped is not None else _first_line(error)
        if stopped is None and not self.sizes:
            self.sizes, self._modules, self._tail = True, ModuleRegions(self.model), None
            return
        if stopped is not None:
            name = self._innermost_module(stopped) or self._innermost_module(stopped.__cause__)
        elif isinstance(error, LateSize) and error.module:
            name = error.module
        else:
            raise RequestError(_refusal(line, error)) from error
        if name is None and isinstance(stopped, NeedsAutograd):
            raise RequestError(f"{line}: {_differentiates(stopped)}") from error
        if name is None and self._tail is not None:
            raise RequestError(_refusal(line, error)) from error
        if name is not None:
            self._tail = None  # it is determined again, after the new region
            self._modules.keep(name, line)
        self._observe(line if name is None else None)

    def keep_python(self, error: BaseException, line: str) -> bool:
        """Add a region for a module that cannot be captured for another reason than a value.

        Args:
            error: the error that stopped capture.
            line: the user's line that raised it.

        Returns:
            Whether there is such a module, and the step runs in eager PyTorch.

        Raises:
            RequestError: the module does something that regions do not support.
        """
        name = self._innermost_module(error)
        if name is None:
            return False
        self._tail = None
        self._causes[line] = reason_of(error)
        self._modules.keep(name, line)
        try:
            self._observe(None)
        except RequestError:
            raise
        except Exception:  # the step itself fails
            return False
        return True

    def _innermost_module(self, error: BaseException | None) -> str | None:
        """Name of the innermost module, no region, in whose call an error was raised; None for the model itself and
        the step.

        A method that is called for itself, such as ``head.compute_loss(...)``, belongs to the caller.
        """
        regions = self._modules.lines
        names = {id(module): name for name, module in self.model.named_modules() if name not in regions}
        found, trace = "", error.__traceback__ if error is not None else None
        while trace is not None:
            owner, code = trace.tb_frame.f_locals.get("self"), trace.tb_frame.f_code
            if isinstance(owner, nn.Module) and id(owner) in names:
                forward = getattr(type(owner).forward, "__code__", None)
                if code in (nn.Module._call_impl.__code__, forward):
                    found = names[id(owner)]
            trace = trace.tb_next
        return found or None

    def _observe(self, tail_line: str | None) -> None:
        """Run the step with real tensors on the example, and record what its regions return."""
        self._modules.forget_calls()
        missing = {name: tensor for name, tensor in self._state() if tensor.is_meta}
        if missing and tail_line is None:
            return  # each region is run with random numbers when it is called
        if sum(tensor.nbytes for tensor in missing.values()) > _STAND_INS:
            raise RequestError(
                f"{tail_line}: the step needs a value here, and the model is on the meta device and has none: "
                "move the line and what depends on it into a module, or compute both ways and choose with torch.where"
            )
        kept = [(tensor, tensor.detach().clone()) for _, tensor in self._state() if not tensor.is_meta]
        random, regions = KeyedRandom(random_key(0, 0, 0)), list(self._modules.lines)
        recorder = Recorder(lambda: random.ordinal)
        stand_ins = {name: stand_in_for(tensor) for name, tensor in missing.items()}
        try:
            with (
                self.changes.of_run(self.model), _reparametrize_module(self.model, stand_ins), output_held(), random,
                self._modules.watched(random, self.changes), numbered(self.model, regions, recorder),
                self.autocasts.resumed(),
            ):  # fmt: skip
                result = self._called(self.model, self.batch)
                state = dict(self.model.named_parameters()), dict(self.model.named_buffers())
            self._refuse_result(result, trained=not missing)  # replacements of missing values have no gradient
            if tail_line is not None:
                self._tail = TailRegion.observed(*state, recorder, self._names, result, random.ordinal, tail_line)
        finally:
            with torch.no_grad():
                for tensor, value in kept:  # a run may write buffers, and parameters through .data
                    if not torch.equal(tensor, value):
                        tensor.copy_(value)

    def _state(self) -> list[tuple[str, Tensor]]:
        return [*self.model.named_parameters(), *self.model.named_buffers()]


def _leave_modules(error: BaseException) -> None:
    """Remove the modules that an exception left from the tracer's stack; the tracer does not do it."""
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        tracer, key = frame.f_locals.get("self"), frame.f_locals.get("module_key")
        if isinstance(tracer, fx.Tracer) and key is not None:
            tracer.module_stack.pop(key, None)
        trace = trace.tb_next


def _differentiates(stopped: NeedsAutograd) -> str:
    """The refusal of a step that differentiates, without its line."""
    if str(stopped).startswith("backward "):
        return (
            "the step calls backward() here: a step only returns its loss, and pipe.step(batch) runs the backward of "
            "all stages, and the optimizer; leave backward() out"
        )
    return (
        "the step differentiates here what the model computed, which other stages then hold: a network whose results "
        "are differentiated runs whole, on one stage: make it a submodule of another module, move this call and all "
        "other calls of the network in the step into that module's forward, and train that module"
    )


def _refusal(line: str, error: BaseException) -> str:
    return (
        f"{line}: control flow here depends on the value of a tensor ({_first_line(error)[:160]}) in a way that cannot "
        "stay Python: move it and what depends on it into a module of its own, or compute both ways and choose with "
        "torch.where"
    )


def _first_line(error: BaseException) -> str:
    return reason_of(error).removeprefix(f"{type(error).__name__}: ")
