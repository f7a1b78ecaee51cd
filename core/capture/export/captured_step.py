"""Turns an exported program into a captured step: classifies its placeholders, and rewrites its graph."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from attrs import define, evolve, field
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export.graph_signature import InputKind

from ...errors import RequestError
from ..graph.autograd_functions import place_hooks
from ..graph.nodes import is_view, module_of, root_of, written_arguments, written_roots
from ..graph.outputs import Outputs, ResultRows, keep_weight_with_loss, row_outputs, step_outputs
from ..graph.rewrites import (
    copy_written,
    depends_on_values,
    drop_checks,
    keep_read_values,
    refuse_written_constants,
    rewrite_aliases,
    rewrite_masked_scatters,
)
from ..graph.sizes import NotSymbolic, Sizes, SizeSymbols, fold_sizes, has_symbols
from ..regions.breaks import Breaks
from ..regions.modes import note_modes
from ..values.capture_errors import LateSize
from ..values.user_lines import first_line, line_of

TAIL = "the end of the step"
"""Name of a tail that stays Python, among the regions of a captured step."""


@define
class CapturedStep:
    """A captured step.

    Args:
        graph: every operator of one microbatch, as `torch.fx` placeholders and calls; ``meta["val"]`` of a node is a
            fake tensor with its shape, dtype and device.
        batch: name of the placeholder → position of that tensor in the flattened batch.
        parameters: name of the placeholder → the parameter's qualified name. A tied weight has one name: its first.
        buffers: the same for buffers.
        constants: name of the placeholder → the constant tensor.
        modules: attribute name → sub-graph of a higher-order operator.
        mutated_buffers: qualified names of the buffers that the step writes.
        outputs: the nodes of its results.
        model_name: for messages.
        fake_mode: the mode that all fake tensors of the graph belong to.
        regions: a module's name or the end of the step, which stay Python → the line that needs a value there.
        gradients: whether a backward follows; if not, no tensor requires a gradient.
        causes: as in ``regions`` → the reason why the line cannot be captured.
        held: objects that its operators name by number.
        batch_writes: position of a leaf of the batch that the step writes in place → the user's line.
        sizes: the symbols of its sizes; None if all sizes are numbers.
        clamps: name of a parameter that the step limits before it reads it, as CLIP does with its logit scale → the
            calls that do it, as (method, arguments); whoever runs the step makes them before.
        flags: set the flags that the first step sets for all later ones; capture puts them back.
    """

    graph: fx.Graph
    batch: dict[str, int]
    parameters: dict[str, str]
    buffers: dict[str, str]
    constants: dict[str, Tensor]
    modules: dict[str, Any]
    mutated_buffers: frozenset[str]
    outputs: Outputs
    model_name: str
    fake_mode: FakeTensorMode
    regions: dict[str, str]
    gradients: bool = True
    causes: dict[str, str] = field(factory=dict)
    held: Sequence[object] = ()
    batch_writes: dict[int, str] = field(factory=dict)
    sizes: SizeSymbols | None = None
    clamps: dict[str, list[tuple[str, Sequence[Any]]]] = field(factory=dict)
    flags: Sequence[Callable[[], object]] = ()

    def with_sizes(self, sizes: Sizes) -> "CapturedStep":
        """The step as if it was captured with these sizes: with numbers in place of symbolic ones.

        Raises:
            NotSymbolic: a sub-graph depends on sizes.
        """
        inner = [m.graph for held in self.modules.values() for m in held.modules() if isinstance(m, fx.GraphModule)]
        if any(has_symbols([*node.args, *node.kwargs.values()]) for graph in inner for node in graph.nodes):
            raise NotSymbolic("a sub-graph depends on sizes")
        with self.fake_mode:
            return evolve(self, graph=sizes.graph(self.graph), sizes=None)


def captured_step(
    program: Any,
    names: Mapping[str, str],
    leaves: int,
    model_name: str,
    breaks: Breaks,
    *,
    gradients: bool = True,
    rows: ResultRows | None = None,
    held: Sequence[object] = (),
) -> CapturedStep:
    """The captured step of an exported program.

    Args:
        program: the exported step; its graph is changed in place.
        names: name of a parameter or buffer in it → its canonical qualified name.
        leaves: number of leaves of the batch.
        model_name: for messages.
        breaks: the step's regions.
        gradients: whether a backward follows.
        rows: of its results, if it returns tensors with a row for each sample and no loss.

    Raises:
        RequestError: the step writes a parameter, or does not return a scalar loss, or a function returns no rows.
        LateSize: a tensor has a data-dependent size.
    """
    batch, parameters, buffers, constants = _inputs(program, names, leaves)
    graph = program.graph
    batch_writes = _rewrite(graph, batch)
    keep_read_values(graph, [node for node, name in buffers.items() if name in breaks.assigned])
    # Export creates its own mode; all later fake tensors must belong to it.
    fake_mode = next(n.meta["val"].fake_mode for n in graph.nodes if isinstance(n.meta.get("val"), FakeTensor))
    modules = {n.target: getattr(program.graph_module, n.target) for n in graph.nodes if n.op == "get_attr"}
    outputs: Outputs
    if rows is None:
        results = step_outputs(program, first_line(breaks.step))
        outputs = keep_weight_with_loss(graph, results, {*batch, *constants})
    else:
        outputs = row_outputs(program, rows)
    regions, causes = ({name or TAIL: text for name, text in d.items()} for d in (breaks.lines, breaks.causes))
    writes = {batch[name]: line for name, line in batch_writes.items()}
    step = CapturedStep(
        graph, batch, parameters, buffers, constants, modules, frozenset(), outputs,
        model_name, fake_mode, regions, gradients, causes, held, writes,
    )  # fmt: skip
    given = {position: node.meta["val"] for node in graph.nodes if (position := batch.get(node.name)) is not None}
    shapes = {position: tuple(value.shape) for position, value in given.items() if isinstance(value, Tensor)}
    if any(map(has_symbols, shapes.values())):
        fake_mode.shape_env.frozen = False  # what is derived from the graph adds guards
        step.sizes = SizeSymbols(fake_mode.shape_env, shapes, breaks.known.reads)
    _take_clamps(step)
    _refuse_written_parameters(step)
    refuse_written_constants(step.graph, step.constants)
    written = written_roots(graph.nodes)
    step.mutated_buffers = frozenset(buffers[name] for name in written if name in buffers)
    return step


def _inputs(
    program: Any, names: Mapping[str, str], leaves: int
) -> tuple[dict[str, int], dict[str, str], dict[str, str], dict[str, Tensor]]:
    """The placeholders of an exported graph: the batch, parameters, buffers and constants; see `CapturedStep`."""
    batch, position = dict[str, int](), 0
    parameters, buffers, constants = dict[str, str](), dict[str, str](), dict[str, Tensor]()
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            if position < leaves and hasattr(spec.arg, "name"):
                batch[spec.arg.name] = position
            position += 1
        elif spec.kind is InputKind.PARAMETER:
            parameters[spec.arg.name] = names[spec.target]
        elif spec.kind is InputKind.BUFFER:
            buffers[spec.arg.name] = names[spec.target]
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            constants[spec.arg.name] = program.constants[spec.target]
    return batch, parameters, buffers, constants


def _rewrite(graph: fx.Graph, batch: Collection[str]) -> dict[str, str]:
    """Rewrite operators that later traces or cuts would not handle correctly.

    Args:
        graph: the exported graph; changed in place.
        batch: names of the batch's placeholders.

    Returns:
        Name of each placeholder of the batch that the step writes in place → the user's line.
    """
    fold_sizes(graph)
    _remove_generators(graph)
    note_modes(graph)
    place_hooks(graph)
    rewrite_aliases(graph)
    written = copy_written(graph, batch)
    drop_checks(graph)
    _refuse_late_sizes(graph)
    rewrite_masked_scatters(graph)
    return written


def _remove_generators(graph: fx.Graph) -> None:
    """Remove generators from random operators, which draw from keyed streams instead."""
    for node in graph.nodes:
        if node.kwargs.get("generator") is not None:
            node.kwargs = {**node.kwargs, "generator": None}


def _refuse_late_sizes(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.op == "call_function" and depends_on_values(node):
            raise LateSize(f"{node.target} returns something of data-dependent size", module_of(node))


def _take_clamps(step: CapturedStep) -> None:
    """Move the writes that limit a parameter before the step reads it out of the graph.

    To limit a parameter for each microbatch or once for all of them is the same.
    """
    read: set[str] = set()
    for node in list(step.graph.nodes):
        first = node.args[0] if node.args else None
        root = root_of(first).name if isinstance(first, fx.Node) else ""
        method, limits = getattr(node.target, "_opname", ""), node.args[1:]
        numbers = not node.kwargs and not any(isinstance(limit, fx.Node) for limit in limits)
        if root in step.parameters and method in _CLAMPS and numbers and root not in read:
            step.clamps.setdefault(step.parameters[root], []).append((method, limits))
            node.replace_all_uses_with(first)
            step.graph.erase_node(node)
        elif not is_view(node):
            read |= {root_of(source).name for source in node.all_input_nodes}


_CLAMPS = ("clamp_", "clamp_min_", "clamp_max_")


def _refuse_written_parameters(step: CapturedStep) -> None:
    for node in step.graph.nodes:
        for argument in written_arguments(node):
            name = step.parameters.get(root_of(argument).name)
            if name is None:
                continue
            kind, what = getattr(node.target, "_opname", ""), f"the step writes parameter '{name}' in place"
            numbers = [repr(value) for value in node.args[1:] if not isinstance(value, fx.Node)]
            write = f"p.{kind}({', '.join(numbers) if len(numbers) == len(node.args) - 1 else '...'})"
            if kind == "embedding_renorm_":
                what = f"the embedding's max_norm= writes parameter '{name}' in its forward"
                write = "p.copy_(torch.renorm(p, 2, 0, max_norm))"
            raise RequestError(
                f"{line_of(node)}: {what}: only the optimizer may change parameters in a step; leave it out and call, "
                f"after each pipe.step(batch), panpipe.weights.on_parameters(pipe, lambda name, p: {write} if name == "
                f"'{name}' else None), or make it a buffer"
            )
