"""Captures an ordinary training step as one graph, including the loss, without tensors on any device.

The step is exported (`torch.export`) over fake tensors *before* autograd, so the captured program is the user's. Export
runs the step's Python; if that fails, a part stays Python. Forward and backward programs are derived from a stage's
part of the graph on the machine that runs it.
"""

import logging
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._logging import _internal
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import _config
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree

from ...errors import RequestError
from ...wording import shape_text
from ..graph.autograd_functions import holding, own_functions, transforms_traced
from ..graph.generated_sources import sources_removed
from ..graph.outputs import ResultRows
from ..graph.recurrence import recurrence_as_operators
from ..graph.rewrites import make_buffer
from ..graph.sizes import computed_once
from ..python.changes import FIX, assigned_buffers_written
from ..python.parameters import references_followed
from ..python.refusals import calls_refused, check_foreign_gradients, check_gradient_hooks
from ..python.torch_settings import with_gradients, without_anomaly_mode
from ..regions.breaks import Breaks, StepFunction
from ..regions.modes import modes_as_calls
from ..regions.module_regions import CapturedOtherwise
from ..values.capture_errors import Refused, WritesTensor, depends_on_value, error_of_type
from ..values.containers import BatchNesting, flatten_batch, shared_texts
from ..values.fake_tensors import fake_of, fake_state
from ..values.printed import show_held
from ..values.sparse_tensors import refuse_sparse_tensors
from ..values.user_lines import first_line, lines_recorded, message_start, raised_by_user, reason_of, user_line
from ..values.value_watch import DRAWS_OUTSIDE, drawn_outside_of_torch
from .captured_step import CapturedStep, captured_step


class _WholeStep(nn.Module):
    """The step as a module, so that it can be exported; the user's model keeps its names under ``model``."""

    def __init__(self, model: nn.Module, breaks: Breaks, nesting: BatchNesting) -> None:
        super().__init__()
        self.model = model
        self._breaks, self._nesting = breaks, nesting
        # What libraries note on parameters, such as a counter; captured parameters are other objects.
        self._notes = {name: dict(vars(p)) for name, p in model.named_parameters() if vars(p)}

    def forward(self, batch: Any) -> Any:
        for name, parameter in self.model.named_parameters() if self._notes else ():
            vars(parameter).update(self._notes.get(name, {}))
        with (
            self._breaks.autocasts.resumed(),
            self._breaks.changes.of_run(self.model, judged=True),
            references_followed(self.model, self._breaks.guards),
            assigned_buffers_written(self.model, self._breaks.assigned, self._breaks.is_constant),
        ):
            return self._breaks.run(self.model, self._nesting.batch(pytree.tree_leaves(batch)))


@sources_removed()
def capture_step(
    model: nn.Module,
    step: StepFunction,
    batch: Any,
    *,
    device: str | torch.device = "cpu",
    gradients: bool = True,
    rows: ResultRows | None = None,
    symbolic: Mapping[int, Collection[int]] | None = None,
) -> CapturedStep:
    """Capture one training step, or a function that is only run forward.

    Args:
        model: the user's module; it and its parameters do not change. They may be on the meta device.
        step: ``step(model, batch) -> loss``, or ``(loss, weight)``, or either followed by a dict of metrics, or an
            object or dict that has a ``loss``.
        batch: one *microbatch*: any nesting of tensors; only shapes and dtypes matter.
        device: on which the step will run; operators are captured for that device.
        gradients: whether a backward follows; if not, the step is captured as under ``torch.no_grad()``.
        rows: of the results, if the function returns any nesting of tensors with a row for each sample, and no loss.
        symbolic: position of a tensor among the batch's leaves → its dimensions whose sizes become symbols. Then a
            step that cannot be captured as one graph raises the first error, of any type.

    Raises:
        RequestError: the step cannot be captured as one graph (with the user's line), or it does not return
            a scalar loss, or no rows.
    """
    leaves, nesting = flatten_batch(batch)
    _check_arguments(step, leaves)
    refuse_sparse_tensors(model, nesting.plain(leaves))
    if gradients:
        check_gradient_hooks(model)
    breaks = Breaks(model, step, batch, loss=rows is None)
    export = partial(_exported, model, breaks, torch.device(device), gradients, rows, symbolic)
    capture = export if symbolic else partial(_captured, breaks, export)
    modes = with_gradients() if gradients else _without_gradients()
    with (
        quiet_torch(),
        without_anomaly_mode(warns=True),
        modes,
        breaks.autocasts.suspended(),
        calls_refused(forward=rows is not None),
        closing(breaks),
    ):
        drawn = drawn_outside_of_torch()
        captured = capture()
        if (kept := breaks.changes.kept) or breaks.changes.flag is not None:
            # The step leaves what it computed, such as a list of losses, or a flag: another run must not use it.
            flag, flags = breaks.changes.flag, breaks.changes.flags
            breaks.again(kept)
            again = capture()
            if flag is not None:
                _refuse_other_graph(captured, again, *flag)
            captured = again
            captured.flags = flags
        if drawn_outside_of_torch() != drawn:
            breaks.drawn = drawn_outside_of_torch()
            capture()  # refused at the line
            raise RequestError(f"{first_line(step)}: {DRAWS_OUTSIDE}")
    if not symbolic:  # with sizes as symbols; an earlier capture has shown it with numbers
        show_held(breaks.printed)
    if gradients:
        check_foreign_gradients(breaks.guards, captured.graph, captured.outputs.main_result, captured.constants)
    return captured


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Within this context torch logs nothing, unless the user enabled it, because a failure is reported in one line."""
    state = _internal.log_state
    handle = logging.Logger.handle

    def pass_on(logger: logging.Logger, record: logging.LogRecord) -> None:
        if record.name != "torch" and not record.name.startswith("torch."):
            handle(logger, record)

    level = logging.getLogger("torch").level
    enabled = "TORCH_LOGS" in os.environ or state.log_qname_to_level or state.artifact_names
    if enabled or logging.NOTSET < level < logging.WARNING:
        yield
        return
    with mock.patch.object(logging.Logger, "handle", pass_on):
        yield


@contextmanager
def symbolic_sizes(parts: bool = False) -> Iterator[None]:
    """The context of captures with symbolic sizes, and of what is derived from them: torch computes sizes once, and
    neither logs nor warns of them.

    Args:
        parts: whether tensor ranks have parts of dimensions. A part of size 1 is not special then, although a whole
            dimension of size 1 is: sequences of as many tokens as ranks have the program of all others.
    """
    oblivious = _config.patch(backed_size_oblivious=parts)  # type: ignore[attr-defined]
    with quiet_torch(), computed_once(), oblivious, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Raw SymInt value")
        yield


@contextmanager
def _without_gradients() -> Iterator[None]:
    """Disable gradients, and the fast path that makes a transformer layer one operator, which cannot be cut."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _refuse_other_graph(captured: CapturedStep, again: CapturedStep, line: str, what: str) -> None:
    """Refuse a step that computes something else after it has set a flag."""
    first, second = (
        [(n.op, str(n.target)) for n in c.graph.nodes if n.op == "call_function"] for c in (captured, again)
    )
    if first != second:
        raise RequestError(f"{line}: the step reads {what} here and sets it, and computes something else then: {FIX}")


def _captured(breaks: Breaks, export: Callable[..., CapturedStep]) -> CapturedStep:
    """Export the step; after each failure, leave one more part of it in Python, and try again."""
    step = breaks.step
    for _ in range(_MAX_BREAKS):
        try:
            with breaks.changes.of_run(breaks.model):  # export replaces containers of modules by copies
                return export()
        except CapturedOtherwise:
            if breaks.as_eager:
                raise
            breaks.begin_as_eager()
        except (RequestError, Warning):  # a warning, if the user's filters raise warnings
            raise
        except WritesTensor as written:
            make_buffer(breaks.model, written)
        except Exception as error:
            line = user_line(error) or first_line(step)
            if (refused := error_of_type(Refused, error)) is not None:
                raise RequestError(f"{line}: {refused}") from error
            try:
                if depends_on_value(error):
                    breaks.widen(error, line)
                elif not breaks.keep_python(error, line):
                    raise RequestError(_refusal(breaks, error, line)) from error
            except RequestError:
                raise
            except Exception as failure:  # the step fails when it runs with values
                raise RequestError(_refusal(breaks, failure, user_line(failure) or line)) from failure
    raise RequestError(
        f"{_MAX_BREAKS} kinds of modules need values of tensors, such as {next(iter(breaks.lines.values()))}: too much "
        "of the step would stay Python; compute both ways and choose with torch.where"
    )


def _refusal(breaks: Breaks, error: Exception, line: str) -> str:
    """The message for a step that raises an error, for one of the user's with the microbatch."""
    reason = reason_of(error)
    leaves, nesting = flatten_batch(breaks.batch)
    shapes = ", ".join(shape_text(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor))
    texts = shared_texts(leaves, nesting)
    if not raised_by_user(error):
        what = "the step cannot be captured as one graph"
        return f"{message_start(line)}{what}: {reason} (for a microbatch of {shapes}); change that line{texts}"
    return (
        f"{message_start(line)}the step raises {reason} for a microbatch of {shapes}: change that line so that it "
        f"accepts one, or the batch or the number of microbatches{texts}"
    )


_MAX_BREAKS = 24
"""Largest number of attempts to capture a step; each that fails adds a region around a line that needs a value."""


def _exported(
    model: nn.Module,
    breaks: Breaks,
    device: torch.device,
    gradients: bool,
    rows: ResultRows | None,
    symbolic: Mapping[int, Collection[int]] | None,
) -> CapturedStep:
    breaks.trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    given, nesting = flatten_batch(breaks.batch)
    whole = _WholeStep(model, breaks, nesting)
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    names, state = fake_state(whole, fake_mode, device, gradients)
    fake_batch = pytree.tree_map_only(Tensor, lambda t: fake_of(t.detach(), fake_mode, device), nesting.plain(given))
    # Where libraries are to run the same code as in eager PyTorch, the step is not exported.
    hidden = mock.patch.object(torch.compiler, "is_exporting", return_value=False) if breaks.as_eager else nullcontext()
    with (
        _reparametrize_module(whole, state), own_functions(), modes_as_calls(), lines_recorded(), holding() as held,
        hidden, warnings.catch_warnings(), transforms_traced(), recurrence_as_operators(),
    ):  # fmt: skip
        # Assignments of a forward are handled: buffers are written, and other attributes are restored.
        warnings.filterwarnings("ignore", message="The tensor attribute.* assigned during export")
        warnings.filterwarnings("ignore", message="Raw SymInt value")
        dims = {i: dict.fromkeys(own, torch.export.Dim.AUTO) for i, own in (symbolic or {}).items()}
        shapes = (nesting.plain([dims.get(i) for i in range(len(given))]),) if dims else None
        with _config.patch(use_duck_shape=False):  # type: ignore[attr-defined]  # equal sizes are equal by chance
            program = torch.export.export(whole, (fake_batch,), strict=False, dynamic_shapes=shapes)
    return captured_step(
        program, names, len(given), type(model).__name__, breaks, gradients=gradients, rows=rows, held=held
    )


def _check_arguments(step: StepFunction, leaves: Sequence[Any]) -> None:
    if not leaves:
        raise RequestError("the batch is empty: give the step a batch with at least one tensor")
    if not callable(step):
        raise RequestError(f"step is {step!r}: give a function step(model, batch) that returns a scalar loss")
