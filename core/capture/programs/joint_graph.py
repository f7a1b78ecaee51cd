"""The joint graph of a stage, forward and backward in one graph, and its division into F, B, I and W.

F saves what the backward reads. B is everything that depends on an incoming gradient. I is the part of B that the
gradients of the stage's inputs need; W is the rest. The backward of a convolution computes both kinds of gradients: it
is in I and in W, with complementary output masks. The backward of a normalisation does so, too, but is in I alone: its
parameters' gradients take little work, and W would need all its inputs and one more gradient.

For the trace the stage graph runs operator by operator, and each node is tagged with the captured value that it comes
from.
"""

import contextlib
import itertools
import operator
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from attrs import define, field
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.utils import _disable_saved_tensors_hooks_during_tracing
from torch._functorch._aot_autograd.functional_utils import assert_functional_graph, from_fun, to_fun
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.node import has_side_effect
from torch.utils import _pytree as pytree

from ...errors import PanpipeError, RequestError
from ..graph.generated_sources import sources_removed
from ..graph.nodes import ancestors, root_of
from ..graph.randomness import KeyedRandom
from ..graph.sizes import NUMBERS, fold_sizes, number
from ..python.torch_settings import without_anomaly_mode
from ..regions.modes import ModalInterpreter
from ..regions.regions import region_of, run_keyed
from ..values.user_lines import line_of, reason_of
from .stage import StageGraph

aten = torch.ops.aten

_MASKED = {aten.convolution_backward.default}
"""Fused backward operators, worth splitting, whose last argument is a mask of the gradients to compute."""


@define
class JointGraph:
    """A stage's joint graph, by the meaning of its inputs and outputs.

    Args:
        graph: the graph.
        primals: placeholders of the stage's inputs, by position.
        tangents: placeholders of incoming gradients, by position of the output they belong to.
        outputs: nodes of the stage's outputs, in order.
        mutations: position of a buffer among the inputs → the node of its new value.
        gradients: position of an input → the node of its gradient, in the order of the inputs.
        constants: attribute name → a tensor that an autograd function creates from Python numbers, for ``get_attr``.
    """

    graph: fx.Graph
    primals: dict[int, fx.Node]
    tangents: dict[int, fx.Node]
    outputs: list[fx.Node]
    mutations: dict[int, fx.Node]
    gradients: dict[int, fx.Node]
    constants: dict[str, Tensor] = field(factory=dict)


@sources_removed()
def trace_joint(stage: StageGraph, *, as_on_cpu: bool = True) -> JointGraph:
    """Trace forward and backward of a stage over fake tensors.

    Args:
        stage: the stage.
        as_on_cpu: whether dropout rounds as in eager PyTorch on a CPU, by separate operators; not for the costs of a
            device whose dropout is one kernel.

    Raises:
        RequestError: an operator of the stage cannot be differentiated or made functional.
    """
    runner = _StageRunner(stage)
    try:
        with without_anomaly_mode(), _without_tokens():
            return _traced(stage, runner, as_on_cpu)
    except PanpipeError:
        raise
    except Exception as error:
        node = runner.running
        what = f"{line_of(node)}: {node.target}" if node is not None else "the backward of a stage"
        raise RequestError(
            f"{what} cannot be turned into forward and backward programs: {reason_of(error)}; use another operator"
        ) from error


def dropout_as_eager(graph: fx.Graph) -> None:
    """Make the backward of dropout round as in eager PyTorch on a CPU, where the mask is multiplied by the scale.

    The mask has one byte per element between forward and backward. The product has the strides that the operator was
    traced with, independent of the gradient's, because its readers were traced with these.

    Args:
        graph: a joint graph; changed in place.
    """
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout_backward.default):
        gradient, mask, scale = node.args
        value, wanted = gradient.meta["val"], node.meta["val"]
        if value.device.type != "cpu" or not scale:
            continue
        with graph.inserting_before(node), value.fake_mode:
            scaled = _inserted(graph, node, aten._to_copy.default, mask, dtype=value.dtype)
            scaled = _inserted(graph, node, aten.div.Scalar, scaled, 1 / scale)
            product = _inserted(graph, node, aten.mul.Tensor, gradient, scaled)
            if product.meta["val"].stride() != wanted.stride():
                # If the operands' strides differ, a product has those of the first; if it needs others, the program
                # restrides it.
                product.args = (scaled, gradient)
                product.meta["val"] = wanted
        node.replace_all_uses_with(product)
        graph.erase_node(node)


def _inserted(graph: fx.Graph, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call with its fake result, at the position and with the ``meta`` of another node."""
    made = graph.call_function(target, args, kwargs)
    values = fx.map_arg(args, lambda node: node.meta["val"])
    made.meta = {**like.meta, "val": target(*values, **kwargs)}
    return made


def _traced(stage: StageGraph, runner: "_StageRunner", as_on_cpu: bool) -> JointGraph:
    """The joint graph as torch traces it: functional, and with autograd's operators; arguments as of `trace_joint`."""
    count, tangents = len(stage.fakes), {i: fake for i, fake in enumerate(stage.tangents) if fake is not None}
    trained = [i for i, fake in enumerate(stage.fakes) if fake.requires_grad]
    mutated, flowed = list[int](), list[int]()

    def both(*given: Tensor) -> list[Any]:
        inputs = list(map(to_fun, given))
        primals, starts = inputs[:count], inputs[len(inputs) - len(tangents) :]
        outputs = runner.run(*inputs[: len(inputs) - len(tangents)])
        was_mutated = torch._functionalize_has_data_mutation  # type: ignore[attr-defined]
        mutated.extend(i for i, one in enumerate(primals) if was_mutated(one.elem))
        news = [from_fun(each) for each in (*outputs, *(primals[i] for i in mutated))]
        tracer = get_proxy_mode().tracer  # type: ignore[union-attr]
        last = next(reversed(tracer.graph.nodes))
        ends = [(outputs[i], start) for i, start in zip(tangents, starts, strict=True) if outputs[i].requires_grad]
        if ends and trained:
            setup_stacktrace_preservation_hooks([end.grad_fn for end, _ in ends if end.grad_fn is not None])
            found = torch.autograd.grad(
                [end for end, _ in ends], [primals[i] for i in trained], [start for _, start in ends],
                allow_unused=True,
            )  # fmt: skip
            flowed.extend(i for i, gradient in zip(trained, found, strict=True) if gradient is not None)
            news += [from_fun(gradient) for gradient in found if gradient is not None]
        for node in itertools.takewhile(lambda node: node is not last, reversed(tracer.graph.nodes)):
            node.meta[BACKWARD] = True
        return news

    fake_mode = stage.fakes[0].fake_mode  # type: ignore[attr-defined]
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(_disable_saved_tensors_hooks_during_tracing())
        stack.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=False))  # notes the lines of gradients
        stack.enter_context(fx_traceback.preserve_node_meta())
        stack.enter_context(fake_mode)
        stack.enter_context(enable_python_dispatcher())
        stack.enter_context(torch._C._ExcludeDispatchKeyGuard(_FUNCTIONALIZE))
        stack.enter_context(FunctionalTensorMode(pre_dispatch=False, _allow_token_discovery=True))
        # In a tensor of each symbolic size: a size that no input of the stage has is an input of the trace, too.
        sizes = [torch.empty(size) for size in stage.symbols]
        traced = make_fx(both, _disable_torch_fn_metadata_mode=True)(*stage.fakes, *sizes, *tangents.values())
    graph: fx.Graph = traced.graph
    graph.eliminate_dead_code()
    assert_functional_graph(graph)
    fold_sizes(graph)
    if as_on_cpu:
        dropout_as_eager(graph)
    places = [node for node in graph.nodes if node.op == "placeholder"]
    made = iter(graph.output_node().args[0])  # type: ignore[arg-type]
    outputs = list(itertools.islice(made, len(stage.tangents)))
    return JointGraph(
        graph, dict(enumerate(places[:count])), dict(zip(tangents, places[len(places) - len(tangents) :], strict=True)),
        outputs, dict(zip(mutated, made)), dict(zip(flowed, made)), _constants(traced),  # noqa: B905
    )  # fmt: skip


_FUNCTIONALIZE = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)


def _constants(module: fx.GraphModule) -> dict[str, Tensor]:
    names = {str(node.target) for node in module.graph.find_nodes(op="get_attr")}
    return {name: held for name in sorted(names) if isinstance(held := getattr(module, name, None), Tensor)}


def forward_nodes(joint: JointGraph) -> set[fx.Node]:
    """The nodes of F: those that outputs and new values of buffers depend on, and the forward's error checks.

    F selects all results of an operator with several, so that only those that the backward reads are saved.
    """
    found = ancestors([*joint.outputs, *joint.mutations.values(), *forward_checks(joint)])
    return found | {user for node in found for user in node.users if user.target is operator.getitem}


def split_masked(graph: fx.Graph, for_inputs: set[fx.Node]) -> None:
    """Duplicate fused backward operators that both I and W need, with complementary masks.

    Args:
        graph: the joint graph; changed in place.
        for_inputs: nodes that the input gradients depend on.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _MASKED or node not in for_inputs:
            continue
        parts = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        mask = list(node.args[-1])
        rest = [i for i, user in parts.items() if mask[i] and user not in for_inputs]
        if not rest:
            continue
        with graph.inserting_after(node):
            twin = graph.node_copy(node)
        twin.args = (*node.args[:-1], [i in rest for i in range(len(mask))])
        node.args = (*node.args[:-1], [mask[i] and i not in rest for i in range(len(mask))])
        for i in rest:
            parts[i].args = (twin, i)


def selecting_nodes(gradient: fx.Node, computed: set[fx.Node]) -> set[fx.Node] | None:
    """The nodes that only select a gradient from computed results; None if it takes more than selecting."""
    picked = ancestors([gradient]) - computed
    return picked if all(node.target is operator.getitem for node in picked) else None


def closed_over(nodes: Iterable[fx.Node], inside: set[fx.Node]) -> list[fx.Node]:
    """The nodes outside a set that its nodes read, in order of first reading."""
    return list(dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside))


def ordered(graph: fx.Graph, nodes: set[fx.Node]) -> list[fx.Node]:
    """Nodes in the graph's order."""
    return [node for node in graph.nodes if node in nodes]


class _StageRunner(ModalInterpreter):
    """Runs a stage graph, each random draw at its ordinal in the whole graph.

    Attributes:
        running: the node that is running, or that raised an error; None before and after a run.
    """

    def __init__(self, stage: StageGraph) -> None:
        super().__init__(fx.GraphModule(stage.modules, stage.graph))
        self._stage, self._first_draw = stage, stage.first_draw
        self._key: Any = None
        self.extra_traceback = False  # the node that raises an error is `running`
        self.running: fx.Node | None = None
        self._sizes: dict[Any, Any] = {}

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        """The arguments of a node; sizes are computed from inputs, because the trace knows a size by its origin."""
        found = super().fetch_args_kwargs_from_env(n)
        return pytree.tree_map_only(NUMBERS, partial(number, self._sizes), found) if self._sizes else found

    def run(self, *inputs: Any, **_: Any) -> Any:
        """The results for the stage's inputs, followed by a tensor of each symbolic size."""
        count, symbols = len(self._stage.fakes), self._stage.symbols
        self._sizes = {size.node.expr: each.shape[0] for size, each in zip(symbols, inputs[count:], strict=True)}
        self._key = inputs[count - 1] if self._first_draw else None
        found = super().run(*inputs[:count])
        self.running = None
        return found

    def run_node(self, n: fx.Node) -> Any:
        self.running = n
        # oneDNN's LSTM has a backward only if it ran with gradients enabled, and the programs of a stage do not.
        with _without_onednn() if n.target is aten.lstm.input else contextlib.nullcontext():
            return tagged(root_of(n).name, lambda: self._drawn(n))

    def _drawn(self, n: fx.Node) -> Any:
        if n.name not in self._first_draw:
            return super().run_node(n)
        if region_of(n) is not None:
            (given, number, *_), _ = self.fetch_args_kwargs_from_env(n)
            return run_keyed(given, number, self._key, self._first_draw[n.name])
        with KeyedRandom(self._key, self._first_draw[n.name]):
            return super().run_node(n)


@contextlib.contextmanager
def _without_onednn() -> Iterator[None]:
    backend: Any = torch.backends.mkldnn
    enabled, backend.enabled = backend.enabled, False
    try:
        yield
    finally:
        backend.enabled = enabled


_CHECK = torch.ops.aten._linalg_check_errors.default
has_side_effect(_CHECK)  # a trace keeps it although nothing reads its result
_TRACES = threading.RLock()
"""Held while operators have no tokens: stages may be traced by several threads."""


@contextlib.contextmanager
def _without_tokens() -> Iterator[None]:
    """Within this context, torch does not order error checks by *tokens*, empty tensors that are passed from one
    to the next: programs run their operators in the graph's order."""
    holder = torch._library.simple_registry.singleton.find("aten::_linalg_check_errors").effect
    with _TRACES, mock.patch.object(holder, "_effect", None):
        yield


def forward_checks(joint: JointGraph) -> set[fx.Node]:
    """Error checks of the forward."""
    return {node for node in joint.graph.nodes if node.target is _CHECK and BACKWARD not in node.meta}


BACKWARD = "backward"
"""Key of the metadata of a node that was traced after the forward."""
CAPTURED = "captured"
"""Where a joint node's metadata has the name of the captured value that it was traced from."""


def tagged(name: str, run: Callable[[], Any]) -> Any:
    """Run a captured node; the nodes that it adds to a graph that is being traced are tagged.

    Args:
        name: the tag: of the value whose storage the node shows.
        run: runs it.
    """
    mode = get_proxy_mode()
    if mode is None:
        return run()
    graph: fx.Graph = mode.tracer.graph
    last = next(iter(reversed(graph.nodes)), None)
    result = run()
    for node in reversed(graph.nodes):
        if node is last:
            break
        node.meta.setdefault(CAPTURED, name)
    return result
