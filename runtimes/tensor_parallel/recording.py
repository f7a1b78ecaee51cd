"""Records the program of one tensor rank, for models to which the user applied ``parallelize_module``.

The step runs once over fake tensors, with DTensors around fake parts of the parameters, and torch's DTensor decides
what each rank computes and where it communicates. The recorded program has plain tensors and all-reduces::

    step(model) ──▶ DTensor over fake tensors ──▶ operators of one rank, _c10d_functional.all_reduce ──▶ a plain step

Plain tensors between the divided modules are parts, too: `layout_watch` checks what the user's code computes with them.

The backward is derived from the recorded forward, where each all-reduce has an all-reduce as its gradient: as many as
DTensor's own backward has with column and row layouts, at other places (`core/tensor_collectives`). So a
user's own backward cannot be kept, and is refused; operators that ran under ``no_grad`` run under it again. For
planning torch's fake process group is enough: no other rank and no device is needed.
"""

import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ...core.capture.graph.sizes import equal, has_symbols
from ...core.capture.python.guards import Guards
from ...core.capture.values.sparse_tensors import distributed_tensors
from ...core.capture.values.user_lines import message_start, user_line
from ...core.errors import RequestError, in_a_line, warn_caller
from ...core.tensor_collectives import ALL_GATHER, ALL_REDUCE, MAX, REDUCE_SCATTER, SUM
from .layout_watch import HEADS, LayoutWatch, WholeCalls, without_layouts
from .layouts import DTensorLayout, check_layout, named_tensors, parts_of

Step = Callable[[nn.Module, Any], Any]


def program_of_rank(model: nn.Module, step: Step, tensor: int) -> tuple[nn.Module, "StepOfRank"]:
    """A model of one rank's parts of the parameters, under their names, and the step that computes with it.

    Args:
        model: with DTensor parameters, and perhaps replicated buffers; it does not change.

    Raises:
        RequestError: the DTensors are on another number of ranks, on several meshes, or in a layout with uneven or
            partial parts; or a buffer is divided.
    """
    found = distributed_tensors(model)
    for name, value in found.items():
        check_layout(name, value, tensor)
    # ``parallelize_module`` replicates the buffers of each module that it divides.
    buffers = {name: found[name] for name, _ in model.named_buffers() if name in found}
    divided = next((name for name, value in buffers.items() if not value.placements[0].is_replicate()), None)
    if divided is not None:
        raise RequestError(
            f"buffer '{divided}' has layout {found[divided].placements[0]!r}: plans support divided parameters, and "
            "buffers that each rank has whole; use Replicate"
        )
    if len({value.device_mesh for value in found.values()}) > 1:
        raise RequestError(
            f"the parameters of {type(model).__name__} are DTensors on several meshes: use one tp dimension for all"
        )
    warn_of_untied_weights(model)
    layouts = {name: DTensorLayout.of(value) for name, value in found.items()}
    return parts_of(model), StepOfRank(model, step, layouts)


class StepOfRank:
    """The recorded step of one rank; recorded again for each shape of the batch, and for symbolic sizes.

    Args:
        layouts: of the DTensor parameters, by name.

    Attributes:
        recorded_from: the model and the step, whose Python values are read.
    """

    def __init__(self, model: nn.Module, step: Step, layouts: Mapping[str, DTensorLayout]) -> None:
        self.recorded_from = model, step
        self._model, self._step, self._layouts = model, step, layouts
        self._known: dict[Hashable, fx.GraphModule] = {}

    def of(self, function: Step) -> "StepOfRank":
        """The same for another function of the model."""
        return StepOfRank(self._model, function, self._layouts)

    def __call__(self, parts: nn.Module, batch: Any) -> Any:
        """Run one rank's program with its parts of the parameters."""
        leaves, spec = pytree.tree_flatten(batch)
        shapes = ((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
        before = Guards(self._model, self._step)
        key = (repr((spec, *shapes)), before.key)
        program = self._known.get(key)
        if program is None:
            with _disable_current_modes():
                program = self._recorded(leaves, spec)
            if not any(map(_is_symbolic, leaves)):  # another capture has other symbols, of the same names
                self._known[key] = program
            now = Guards(self._model, self._step)
            changed = next(before.others(now), None)
            if changed is not None:
                raise RequestError(
                    f"{now.line(changed)}: the step changes '{changed}', which was {before.text(changed)} and is "
                    f"{now.text(changed)}: steps of models with DTensor parameters may not change Python values; "
                    "remove the assignment, or assign this value before panpipe.pipeline"
                )
        state = named_tensors(parts)
        return _Run(program).run([*state.values()], leaves)

    def _recorded(self, leaves: list[Any], spec: pytree.TreeSpec) -> fx.GraphModule:
        try:
            # Attention takes another kernel where its mask needs a gradient.
            program = self._program(leaves, spec, gradients=True)
        except RequestError as error:
            if "modified inplace" not in str(error):
                raise
            # Autograd refuses that the result of a divided module is written.
            program = self._program(leaves, spec, gradients=False)
        keep_dimensions(program.graph)
        drop_views(program.graph)
        replace_collectives(program.graph)
        program.recompile()
        return program

    def _program(self, leaves: list[Any], spec: pytree.TreeSpec, gradients: bool) -> fx.GraphModule:
        """The operators of one rank.

        Args:
            gradients: whether parameters need gradients.
        """
        from torch.distributed.tensor import DTensor

        model, names = self._model, list(named_tensors(self._model))
        fake_mode = _mode_of(leaves)
        mesh = next(iter(self._layouts.values())).mesh
        try:
            whole: WholeCalls | RequestError = self._whole_calls(leaves, spec, gradients)
        except RequestError as error:  # its code may compute with sizes of parts
            whole = error

        def run(state: list[Tensor], given: list[Any]) -> Any:
            regions, watch = _GradRegions(), LayoutWatch(mesh, fake_mode, whole)
            values: dict[str, Tensor] = dict(zip(names, state, strict=True))
            for name, layout in self._layouts.items():
                values[name] = layout.whole(values[name])
            with regions, watch, _own_backward_refused(watch), _reparametrize_module(model, values):
                found = self._step(model, pytree.tree_unflatten(given, spec))
                watch.check_results(found)
            return pytree.tree_map_only(DTensor, lambda each: each.full_tensor(), found)

        with fake_mode:
            state = [
                (
                    _fake(value.shape, value.stride(), value.dtype)
                    if name not in self._layouts
                    else self._layouts[name].part(value.dtype)
                ).requires_grad_(gradients and value.requires_grad)
                for name, value in named_tensors(model).items()
            ]
            given = [_fake_leaf(leaf) for leaf in leaves]
        failure = "the step cannot be recorded over DTensors"
        with fake_mode, _recording(failure, _FOR_RANKS), warnings.catch_warnings():
            # Torch would not draw the numbers of one process on a CPU; `LayoutWatch` does.
            warnings.filterwarnings("ignore", "DTensor random operators may not have complete support")
            return make_fx(run)(state, given)  # of fake tensors: a tracing mode would make others, with other symbols

    def _whole_calls(self, leaves: list[Any], spec: pytree.TreeSpec, gradients: bool) -> WholeCalls:
        """The calls of the step in one process."""
        failure = "the step draws random numbers, and cannot be run with whole parameters"
        calls = WholeCalls()
        with _recording(failure, _FOR_WHOLE), _mode_of(leaves):
            values = {
                name: _fake(value.shape, value.stride(), value.dtype).requires_grad_(gradients and value.requires_grad)
                for name, value in named_tensors(self._model).items()
            }
            batch = pytree.tree_unflatten([_fake_leaf(leaf) for leaf in leaves], spec)
            with without_layouts(self._model, values), calls:
                self._step(self._model, batch)
        return calls


_FOR_RANKS = "steps of models with DTensor parameters run without values of tensors, in Python that torch can trace"
_FIXES = {
    "mixed torch.Tensor and DTensor": (
        "a divided module returns a DTensor and another tensor is plain, or code outside of a module uses its divided "
        "parameter: use use_local_output=True, or PrepareModuleInput and PrepareModuleOutput around this code"
    ),
    "don't multiply up to the size of dim": HEADS,
    "does not have a sharding strategy": "use use_local_output=True, so that it gets plain tensors",
}
"""Parts of torch's messages, and what to do."""
_FOR_WHOLE = (
    "tensor ranks draw the numbers of one process, whose shapes are found out so: write sizes that depend on the "
    "number of tensor ranks as -1, such as the number of heads, and divide with parallelize_module alone; or set "
    "the rates of dropout to 0"
)


@contextmanager
def _recording(failure: str, rule: str) -> Iterator[None]:
    """A context in which failures are raised as a request error."""
    try:
        with torch.enable_grad():
            yield
    except RequestError:
        raise
    except Exception as error:
        fix = next((fix for said, fix in _FIXES.items() if said in str(error)), rule)
        raise RequestError(f"{message_start(user_line(error))}{failure}: {in_a_line(error)}; {fix}") from error


def _fake(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="cpu")


def _fake_leaf(leaf: Any) -> Any:
    return _fake(leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _is_symbolic(leaf: Any) -> bool:
    return isinstance(leaf, FakeTensor) and has_symbols(tuple(leaf.shape))


def _mode_of(leaves: list[Any]) -> FakeTensorMode:
    """The mode of the capture whose batch has symbolic sizes, so that what layouts need of them becomes its guards."""
    symbolic = next((leaf for leaf in leaves if _is_symbolic(leaf)), None)
    return FakeTensorMode(allow_non_fake_inputs=True) if symbolic is None else symbolic.fake_mode


_NO_GRAD = "panpipe_no_grad"
"""The entry in ``meta`` of nodes that ran under ``no_grad``."""


class _Run(fx.Interpreter):
    """Runs a recorded program."""

    def run_node(self, n: fx.Node) -> Any:
        if _NO_GRAD not in n.meta:
            return super().run_node(n)
        with torch.no_grad():
            return super().run_node(n)


class _GradRegions(TorchFunctionMode):
    """Marks the operators that are recorded while the user's code disables gradients."""

    def __init__(self) -> None:
        super().__init__()
        self._first: int | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._set_grad_enabled:
            mode = get_proxy_mode()
            assert mode is not None
            self._change(mode.tracer.graph, bool(args[0]))
        return func(*args, **(kwargs or {}))

    def _change(self, graph: fx.Graph, enabled: bool) -> None:
        if not enabled and self._first is None:
            self._first = len(graph.nodes)
        elif enabled and self._first is not None:
            for node in [*graph.nodes][self._first :]:
                node.meta[_NO_GRAD] = True
            self._first = None


@contextmanager
def _own_backward_refused(watch: LayoutWatch) -> Iterator[None]:
    """A context in which autograd functions outside of torch are refused: their backward would be lost.

    Args:
        watch: follows the layouts that torch's own functions change.
    """
    original = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]

    def apply(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if not function.__module__.startswith("torch.distributed."):
            raise RequestError(
                f"the step calls the autograd function {function.__qualname__}: in models with DTensor parameters the "
                "backward is derived from the forward's operators; write it with operators, without checkpoints of "
                "torch.utils.checkpoint with use_reentrant=True"
            )
        return watch.apply(function, original, *args, **kwargs)

    with mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)):
        yield


def keep_dimensions(graph: fx.Graph) -> None:
    """Guard symbolic sizes against 1 where a dimension of size 1 would be removed: the program keeps it."""
    for node in graph.nodes:
        if getattr(node.target, "overloadpacket", None) is torch.ops.aten.squeeze:
            shape = node.args[0].meta["val"].shape
            dims = node.args[1] if len(node.args) > 1 else range(len(shape))
            for dim in [dims] if isinstance(dims, int) else dims:
                bool(shape[dim] != 1)


def drop_views(graph: fx.Graph) -> None:
    """Remove views of the same shape: DTensor takes one of each parameter at the start, which is no work there."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.view.default and equal(node.meta["val"].shape, node.args[0].meta["val"].shape):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def replace_collectives(graph: fx.Graph) -> None:
    """Replace functional collectives by panpipe's.

    Raises:
        RequestError: the program communicates in another way.
    """
    for node in list(graph.nodes):
        target = node.target
        if not (isinstance(target, torch._ops.OpOverload) and target.namespace == "_c10d_functional"):
            continue
        name = target._schema.name.split("::")[-1]
        if name == "wait_tensor":
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif name == "all_reduce" and (node.args[1] == SUM or (node.args[1] == MAX and _before_softmax(node))):
            node.target, node.args = ALL_REDUCE, node.args[:2]
        elif name == "all_gather_into_tensor":
            node.target, node.args = ALL_GATHER, node.args[:2]
        elif name == "reduce_scatter_tensor" and node.args[1] == SUM:
            node.target, node.args = REDUCE_SCATTER, (node.args[0], node.args[2])
        else:
            of = f" of '{node.args[1]}'" if len(node.args) > 1 and isinstance(node.args[1], str) else ""
            raise RequestError(
                f"the model's layouts need {name}{of} between tensor ranks: sums, all-gathers and reduce-scatters of "
                "sums are supported; use layouts of ColwiseParallel, RowwiseParallel and SequenceParallel"
            )


def _before_softmax(node: fx.Node) -> bool:
    """Whether a maximum is only subtracted before a logarithm of a softmax, which does not depend on it."""
    aten = torch.ops.aten
    users = [user for wait in node.users for user in wait.users]
    if [user.target for user in users] != [aten.sub.Tensor] or users[0].args[1] not in node.users:
        return False
    shifted = users[0]
    others = sorted(shifted.users, key=lambda user: user.target is not aten.exp.default)
    if [user.target for user in others] != [aten.exp.default, aten.sub.Tensor] or others[1].args[0] is not shifted:
        return False
    chain: Any = others[1].args[1]
    for expected in (aten.log.default, None, None, aten.sum.dim_IntList, aten.exp.default):
        if expected is not None and chain.target is not expected:
            return False
        chain = chain.args[0]
    return chain is shifted


def warn_of_untied_weights(model: nn.Module) -> None:
    """Warn if the configuration of a model ties the embedding and the head, and they have two weights.

    Args:
        model: the user's, with DTensors.
    """
    for name, module in model.named_modules():
        if not getattr(getattr(module, "config", None), "tie_word_embeddings", False):
            continue
        first, last = (_embeddings(module, method) for method in ("get_input_embeddings", "get_output_embeddings"))
        if first is None or last is None or first is last:
            continue
        warn_caller(
            f"{name or type(module).__name__} has tie_word_embeddings=True, and embedding and head are two weights, "
            "which would both be trained: parallelize_module unties a weight that two modules share; tie them again "
            "after it (head.weight = embedding.weight), or build the model with tie_word_embeddings=False",
        )


def _embeddings(module: Any, method: str) -> Any:
    """The weight of the embedding or the head; None if the model has none."""
    found = getattr(module, method)() if hasattr(module, method) else None
    return getattr(found, "weight", None)
