"""Capture: an ordinary training step becomes one operator graph, loss included, with no tensor on any device.

The step is exported (`torch.export`) over fake tensors *before* autograd: what is captured is the program that the user
wrote. Export runs the step's Python; where that fails, Dynamo reads it; where that fails too, a part stays Python.
Forward and backward programs are derived from a stage's part of it on the machine that runs it.
"""

import contextlib
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import define, evolve, frozen
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export.graph_signature import InputKind, OutputKind
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree

from ..errors import RequestError
from .aliases import copy_written, rewrite_aliases
from .breaks import Breaks, StepFunction
from .checks import depends_on_values, drop_checks
from .functions import own_functions, place_hooks
from .leftovers import assigned_buffers_written, attributes_kept
from .masked import rewrite_masked_scatters
from .modes import modes_as_calls, note_modes
from .nodes import WITH_PREVIOUS, line_of, module_of, root_of, written_arguments
from .printed import Printed
from .recurrent import split_layers
from .values import LateSize, Refused, depends_on_value, error_chain, first_of


@frozen
class StepOutputs:
    """Where the parts of the step's result stand in the captured graph.

    Args:
        loss: name of the node that computes the loss.
        weight: name of the node of its weight, a number, or None where the step returns none.
        metrics: name of the node of every metric, or a plain value.
        texts: names of the nodes whose values the step writes into text, by number.
        printed: what it prints and logs for each microbatch.
    """

    loss: str
    weight: str | float | None
    metrics: Mapping[str, Any]
    texts: tuple[str, ...] = ()
    printed: Printed = Printed()  # noqa: RUF009 (never changed)

    @property
    def nodes(self) -> list[str]:
        """Names of all nodes whose values leave the step: loss, weight, metrics, texts."""
        values = [self.loss, self.weight, *self.metrics.values(), *self.texts]
        return [value for value in values if isinstance(value, str)]


@define
class CapturedStep:
    """A captured step.

    Args:
        graph: every operator of one microbatch, as `torch.fx` placeholders and calls; ``meta["val"]`` of a node is a
            fake tensor that tells shape, dtype and device.
        batch: name of the placeholder → position of that tensor in the flattened batch.
        parameters: name of the placeholder → the parameter's qualified name. A tied weight has one name: its first.
        buffers: the same for buffers.
        constants: name of the placeholder → the constant tensor.
        modules: attribute name → sub-graph of a higher-order operator.
        mutated_buffers: qualified names of the buffers that the step writes.
        outputs: where the loss is.
        model_name: for people.
        fake_mode: the mode that all fake tensors of the graph belong to.
        regions: what stays Python, a module's name or the end of the step → the line that needs a value there.
    """

    graph: fx.Graph
    batch: dict[str, int]
    parameters: dict[str, str]
    buffers: dict[str, str]
    constants: dict[str, Tensor]
    modules: dict[str, Any]
    mutated_buffers: frozenset[str]
    outputs: StepOutputs
    model_name: str
    fake_mode: FakeTensorMode
    regions: dict[str, str]


class _PlainStep(nn.Module):
    """The step as a module and nothing more: what Dynamo can look through."""

    def __init__(self, model: nn.Module, breaks: Breaks) -> None:
        super().__init__()
        self.model = model
        self._step = breaks.step

    def forward(self, batch: Any) -> Any:
        return self._step(self.model, batch), []


class _WholeStep(nn.Module):
    """The step as a module, so that it can be exported; the user's model keeps its names under ``model``."""

    def __init__(self, model: nn.Module, breaks: Breaks) -> None:
        super().__init__()
        self.model = model
        self._breaks = breaks

    def forward(self, batch: Any) -> Any:
        with attributes_kept(self.model, self._breaks.step), assigned_buffers_written(self.model):
            return self._breaks.run(self.model, batch)


def capture_step(
    model: nn.Module, step: StepFunction, batch: Any, *, device: str | torch.device = "cpu"
) -> CapturedStep:
    """Capture one training step.

    Args:
        model: the user's module; neither it nor its parameters change. They may be on the meta device.
        step: ``step(model, batch) -> loss``, or ``(loss, weight)``, or either followed by a dict of metrics.
        batch: one *microbatch*: any nesting of tensors; only shapes and dtypes matter.
        device: where the step will run; the kernels of that device are what is captured.

    Raises:
        RequestError: the step cannot be captured as one graph (with the user's line), or it returns no scalar loss.
    """
    _check_loss(step, batch)
    _warn_of_gradient_hooks(model)
    breaks = Breaks(model, step, batch)
    for _ in range(_MAX_BREAKS):
        try:
            return _exported(model, breaks, torch.device(device))
        except RequestError:
            raise
        except Exception as error:
            line = _user_line(error, step)
            if (refused := first_of(Refused, error)) is not None:
                raise RequestError(f"{line}: {refused}") from error
            if depends_on_value(error):
                breaks.widen(error, line)
                continue
            captured = _exported_by_dynamo(model, breaks, torch.device(device))
            if captured is not None:
                return captured
            if not breaks.keep_python(error, line):
                raise RequestError(_capture_failure(error, step)) from error
    raise RequestError(
        f"{_MAX_BREAKS} kinds of modules need values of tensors, such as {next(iter(breaks.lines.values()))}: the "
        " step is Python more than operators; compute both ways and choose with torch.where"
    )


def _warn_of_gradient_hooks(model: nn.Module) -> None:
    hooked = [
        *(f"module '{n}'" for n, m in model.named_modules() if m._backward_hooks or m._backward_pre_hooks),
        *(f"parameter '{n}'" for n, p in model.named_parameters()
          if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)),
    ]  # fmt: skip
    if hooked:
        warnings.warn(
            f"{hooked[0]} has a hook on its gradient, one of {len(hooked)}: a pipeline does not call it; change "
            "gradients by Tensor.register_hook in the forward, or between step and update",
            stacklevel=3,
        )


_MAX_BREAKS = 24
"""Attempts to capture a step; each ends at a line that needs a value and makes a region of what is around it."""


def _exported_by_dynamo(model: nn.Module, breaks: Breaks, device: torch.device) -> CapturedStep | None:
    """What Dynamo captures, which reads Python's bytecode instead of running it; None where it cannot, either.

    It knows no regions, and takes the whole step or nothing.
    """
    if breaks.lines:
        return None
    try:
        return _exported(model, breaks, device, strict=True)
    except Exception:
        return None


def _exported(model: nn.Module, breaks: Breaks, device: torch.device, strict: bool = False) -> CapturedStep:
    whole = _PlainStep(model, breaks) if strict else _WholeStep(model, breaks)
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    names, state = _fake_state(whole, fake_mode, device)
    fake_batch = pytree.tree_map_only(Tensor, lambda t: _fake(t.detach(), fake_mode, device), breaks.batch)
    functions = contextlib.nullcontext() if strict else own_functions()
    with _reparametrize_module(whole, state), functions, modes_as_calls(), warnings.catch_warnings():
        # What a forward assigns is seen to: buffers are written, and the rest is taken back.
        warnings.filterwarnings("ignore", message="The tensor attribute.* assigned during export")
        program = torch.export.export(whole, (fake_batch,), strict=strict)
    return _captured(program, names, fake_batch, type(model).__name__, breaks)


def _check_loss(step: StepFunction, batch: Any) -> None:
    if not pytree.tree_leaves(batch):
        raise RequestError("the batch holds nothing: give the step a batch with at least one tensor")
    if not callable(step):
        raise RequestError(f"step is {step!r}: give a function step(model, batch) that returns a scalar loss")


def _fake(tensor: Tensor, mode: FakeTensorMode, device: torch.device) -> FakeTensor:
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)  # type: ignore[return-value]


def _fake_state(
    whole: nn.Module, mode: FakeTensorMode, device: torch.device
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Fake parameters and buffers under every name they have, and the canonical name behind each of these names.

    The canonical name of a tied weight is the first of its names, in the order of ``named_parameters``.
    """
    canonical: dict[str, str] = {}
    fakes: dict[str, Tensor] = {}
    first: dict[int, str] = {}
    for source in (whole.named_parameters, whole.named_buffers):
        for name, tensor in source(remove_duplicate=False):
            origin = first.setdefault(id(tensor), name)
            canonical[name] = origin.removeprefix("model.")
            if origin == name:
                fake: Tensor = _fake(tensor.detach(), mode, device)
                fakes[name] = (
                    nn.Parameter(fake, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
                )
            else:
                fakes[name] = fakes[origin]
    return canonical, fakes


_ROOT = Path(__file__).resolve().parents[2]
_STANDARD_LIBRARY = str(Path(logging.__file__).parents[1])
_OWN_CODE = tuple(str(_ROOT / name) for name in ("core", "runtimes", "simulators", "backends", "cli", "api.py"))


def _user_line(error: BaseException, step: StepFunction) -> str:
    """The deepest line of the user's own code (not of torch or panpipe) in an error's traceback."""
    found = ""
    for link in error_chain(error):
        trace = link.__traceback__
        while trace is not None:
            name = trace.tb_frame.f_code.co_filename
            library = name.startswith(_STANDARD_LIBRARY) and "site-packages" not in name
            if "/torch/" not in name and not library and not name.startswith((*_OWN_CODE, "<")):
                found = f"{name}:{trace.tb_lineno} in {trace.tb_frame.f_code.co_name}"
            trace = trace.tb_next
    code = getattr(step, "__code__", None)
    return found or (f"{code.co_filename}:{code.co_firstlineno}" if code is not None else "")


def _capture_failure(error: Exception, step: StepFunction) -> str:
    line = _user_line(error, step)
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"{line}: the step cannot be captured as one graph: {type(error).__name__}: {first[:300]}; change that line"


def _captured(program: Any, names: dict[str, str], fake_batch: Any, model_name: str, breaks: Breaks) -> CapturedStep:
    signature = program.graph_signature
    batch, parameters, buffers, constants = {}, {}, {}, {}
    leaves = pytree.tree_leaves(fake_batch)
    position = 0
    for spec in signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            if position < len(leaves) and hasattr(spec.arg, "name"):
                batch[spec.arg.name] = position
            position += 1
        elif spec.kind is InputKind.PARAMETER:
            parameters[spec.arg.name] = names[spec.target]
        elif spec.kind is InputKind.BUFFER:
            buffers[spec.arg.name] = names[spec.target]
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            constants[spec.arg.name] = program.constants[spec.target]
    graph = program.graph
    _leave_generators(graph)
    note_modes(graph)
    place_hooks(graph)
    rewrite_aliases(graph)
    copy_written(graph, batch)
    drop_checks(graph)
    _refuse_late_sizes(graph)
    split_layers(graph)
    rewrite_masked_scatters(graph)
    # Export makes a mode of its own; every later fake tensor has to belong to it.
    fake_mode = next(n.meta["val"].fake_mode for n in graph.nodes if isinstance(n.meta.get("val"), FakeTensor))
    modules = {n.target: getattr(program.graph_module, n.target) for n in graph.nodes if n.op == "get_attr"}
    specs = [s for s in signature.output_specs if s.kind is OutputKind.USER_OUTPUT]
    outputs = _weight_beside_loss(graph, _step_outputs(program, graph, specs, breaks.printed), {*batch, *constants})
    regions = {name or "the end of the step": line for name, line in breaks.lines.items()}
    step = CapturedStep(
        graph, batch, parameters, buffers, constants, modules, frozenset(), outputs, model_name, fake_mode, regions
    )
    _refuse_written_parameters(step)
    written = (root_of(argument).name for node in graph.nodes for argument in written_arguments(node))
    step.mutated_buffers = frozenset(buffers[name] for name in written if name in buffers)
    return step


def _weight_beside_loss(graph: fx.Graph, outputs: StepOutputs, given: set[str]) -> StepOutputs:
    """Have a weight that the model computes arrive where the loss does: the loss's gradient begins with it.

    Args:
        graph: a captured graph; changed in place.
        outputs: its results.
        given: names of placeholders that every stage has; a weight of these alone is computed where it is needed.
    """
    nodes = {node.name: node for node in graph.nodes}
    weight, loss = nodes.get(str(outputs.weight)), nodes[outputs.loss]
    if weight is None or not _computed(weight, given):
        return outputs
    places = {node: i for i, node in enumerate(graph.nodes)}
    last, end = max(weight, loss, key=lambda node: places[node]), next(reversed(graph.nodes))
    copies = []
    for node in (weight, loss):
        with graph.inserting_after(last):
            last = graph.call_function(torch.ops.aten.clone.default, (node,))
        last.meta = {**node.meta, WITH_PREVIOUS: node is loss}
        end.replace_input_with(node, last)
        copies.append(last.name)
    return evolve(outputs, weight=copies[0], loss=copies[1])


def _computed(node: fx.Node, given: set[str]) -> bool:
    """Whether a node depends on more than some placeholders."""
    todo, seen = [node], {node}
    while todo:
        found = todo.pop()
        if found.op == "placeholder" and found.name not in given:
            return True
        todo += [source for source in found.all_input_nodes if source not in seen]
        seen.update(found.all_input_nodes)
    return False


def _refuse_written_parameters(step: CapturedStep) -> None:
    for node in step.graph.nodes:
        for argument in written_arguments(node):
            name = step.parameters.get(root_of(argument).name)
            if name is not None:
                raise RequestError(
                    f"{line_of(node)}: the step writes parameter '{name}' in place: parameters change by the optimizer "
                    "alone; write it between steps, or make it a buffer"
                )


def _leave_generators(graph: fx.Graph) -> None:
    """Random operators draw from keyed streams; a generator that the step hands them says nothing more."""
    for node in graph.nodes:
        if node.kwargs.get("generator") is not None:
            node.kwargs = {**node.kwargs, "generator": None}


def _refuse_late_sizes(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.op == "call_function" and depends_on_values(node):
            raise LateSize(f"{node.target} returns something of data-dependent size", module_of(node))


def _step_outputs(program: Any, graph: fx.Graph, specs: list[Any], printed: Printed) -> StepOutputs:
    flat = [getattr(spec.arg, "name", None) or getattr(spec.arg, "value", None) for spec in specs]
    result, texts = pytree.tree_unflatten(flat, program.call_spec.out_spec)
    parts = list(result) if isinstance(result, tuple | list) else [result]
    metrics = parts.pop() if len(parts) > 1 and isinstance(parts[-1], dict) else {}
    rule = "return a scalar loss, or (loss, weight), or either followed by a dict of metrics"
    if not parts or len(parts) > 2 or not isinstance(parts[0], str):
        raise RequestError(f"the step returns {type(result).__name__} and no scalar loss: {rule}")
    node = next(n for n in graph.nodes if n.name == parts[0])
    value = node.meta["val"]
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.dtype.is_floating_point:
        shape = f"a {value.dtype} tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise RequestError(f"the step returns {shape}, which is no scalar loss: {rule}; reduce it with .mean()")
    return StepOutputs(parts[0], parts[1] if len(parts) == 2 else None, dict(metrics), tuple(texts), printed)
