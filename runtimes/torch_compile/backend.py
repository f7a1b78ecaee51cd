"""The backend of ``torch.compile``, and its options: each graph of Dynamo becomes a pipeline."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations, islice
from typing import Any

import torch
from attrs import field, fields, frozen
from torch import Tensor, fx, nn

from ...core.arguments import whole_number
from ...core.errors import RequestError, warn_caller
from ..batch.lru_cache import LruCache
from ..microbatches import microbatch_sizes
from .cutting import CutGraph, Stage, cut
from .graph_run import Pass, StageThreads
from .samples import NodeInfo, SampleCheck, node_info, tensors_of

_PROBES = (13, 11)
"""Numbers of samples that the graph is traced with in addition to that of a microbatch: if it supports both, it is
assumed to support any."""
_MOST_SHARED = 40
"""Sets of arguments that are tried as shared by all microbatches: all sets of five arguments are 30."""
_SHAPES = 16
"""Number of shapes of arguments whose cut graphs are kept."""
_OF_MODULES = ("._modules[", "._parameters[", "._buffers[")
"""Parts of Dynamo's names of the sources of arguments that are not the model's own: parameters and buffers."""
_warned: set[str] = set()


_ORDER = "autograd decides when backwards run, so there is no plan of one step with forwards and backwards"
NEED_A_PLAN = dict.fromkeys(("offload", "offload_to", "host_memory", "recompute", "schedule", "plan"), _ORDER)
"""Options of ``panpipe.pipeline`` that this backend cannot have, with the reason."""


def _whole(instance: "Options", attribute: Any, value: object) -> None:
    whole_number(f"option {attribute.name}", value, 1)


def _dims(instance: "Options", attribute: Any, value: object) -> None:
    if not isinstance(value, Mapping) or any(
        dim is not None and (dim != 0 or isinstance(dim, bool)) for dim in value.values()
    ):
        raise RequestError(
            f"option {attribute.name} is {value!r}: give the names of arguments with 0, where their samples are, or "
            "None for what all microbatches share, such as {'x': 0, 'mask': None}"
        )


@frozen
class Options:
    """``options`` of ``torch.compile``.

    Args:
        devices: number of threads and of stages.
        microbatches: number of microbatches that a batch is cut into, along dimension 0.
        batch_dims: name of an argument → 0 if that dimension has the samples, None if all microbatches share the
            argument. Other arguments have samples if their dimension 0 has the same size.
    """

    devices: int = field(default=2, validator=_whole)
    microbatches: int = field(default=4, validator=_whole)
    batch_dims: Mapping[str, int | None] = field(factory=dict, validator=_dims)


def read_options(given: Mapping[str, Any]) -> Options:
    """The options of ``torch.compile(..., options=)``.

    Raises:
        RequestError: one of them is unknown or invalid.
    """
    known = [one.name for one in fields(Options)]
    unknown = next((name for name in given if name not in known), None)
    if unknown in NEED_A_PLAN:
        raise RequestError(
            f"backend 'panpipe' has no option '{unknown}': {NEED_A_PLAN[unknown]}; give {unknown} to panpipe.pipeline, "
            "which has the loss and the optimizer"
        )
    if unknown is not None:
        raise RequestError(f"there is no option '{unknown}' of backend 'panpipe': known are {', '.join(known)}")
    return Options(**given)


def panpipe_backend(graph: fx.GraphModule, example: Sequence[Any], *, options: Mapping[str, Any] | None = None) -> Any:
    """Called for each graph by ``torch.compile(model, backend="panpipe", options={"devices": 2, "microbatches": 4})``.

    The batch is cut into microbatches, along dimension 0 of the model's own arguments. They go through stages on
    threads. The loss is outside, so all forwards run before all backwards. Outputs and gradients are those of the
    microbatches one after another: BatchNorm computes the statistics of each, and each draws its own random numbers.

    Everything outside of the call works as usual: autocast, a GradScaler, clipping, accumulation over several
    backwards, optimizers, schedulers, hooks on parameters, ``model.eval()`` and ``torch.no_grad()``. Under autocast the
    gradient of a weight has the lower precision for each microbatch, and their sum has the weight's. Dropout draws
    other numbers than eager PyTorch; ``torch.manual_seed`` determines them, also when a checkpoint recomputes.

    The call of the compiled model, or its backward, raises a `RequestError` of one line for what is not supported: a
    model that is not on the CPU, outputs without a row for each sample, an argument that may have samples or be shared,
    as tracing with another number of samples shows (decided by ``batch_dims``), in-place writes of an argument, a
    second backward through one call (``retain_graph=True``), and gradients of gradients (``create_graph=True``).

    Returns:
        The function that runs the graph. Its call refuses wrong options: Dynamo hides errors that are raised while it
        compiles.
    """
    try:
        return _GraphPipeline(graph, read_options(options or {}))
    except RequestError as error:
        return partial(_refuse, str(error))


def _refuse(reason: str, *arguments: Any) -> None:
    raise RequestError(reason)


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warn_caller(f"panpipe: {text}")


class _GraphPipeline:
    """A graph of Dynamo, with the same arguments and outputs.

    Args:
        graph: the graph; parameters and buffers are among its arguments.
    """

    def __init__(self, graph: fx.GraphModule, options: Options) -> None:
        self._graph, self._options = graph, options
        self._arguments = [node for node in graph.graph.nodes if node.op == "placeholder"]
        (output,) = (node for node in graph.graph.nodes if node.op == "output")
        self._outputs = tensors_of(output)
        self._returned = [n for n in dict.fromkeys(self._outputs) if isinstance(n, fx.Node) and n.op != "placeholder"]
        self._cuts: LruCache[Any, CutGraph | tuple[()]] = LruCache(_SHAPES)
        self._threads = StageThreads(options.devices)
        # Dynamo deletes this information about arguments after compilation.
        self._module_arguments = [place for place, node in enumerate(self._arguments) if _of_module(node)]
        self._check = SampleCheck(graph)

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        key = tuple(
            (tuple(one.shape), one.dtype, one.requires_grad) if isinstance(one, Tensor) else one for one in arguments
        )
        graph = self._cuts.use(key)
        if graph is None:
            graph = self._cut(arguments) or ()
            self._cuts.keep(key, graph)
        if not isinstance(graph, CutGraph):
            return tuple(self._graph(*arguments))
        gradients = torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in arguments)
        # One draw of the user's generator: torch.manual_seed determines the numbers, and they differ between calls.
        drawn = int(torch.randint(1 << 62, ())) if graph.random else 0
        run = Pass(graph, self._threads, arguments, gradients, (drawn, 0))
        tensors = [one if isinstance(one, Tensor) else None for one in arguments]
        found = _Pipelined.apply(run, *tensors) if gradients else run.forward()  # type: ignore[no-untyped-call]
        values = dict(zip(graph.outputs, found, strict=True)) | dict(zip(self._arguments, arguments, strict=True))
        return tuple(values[one] if isinstance(one, fx.Node) else one for one in self._outputs)

    def _cut(self, arguments: Sequence[Any]) -> CutGraph | None:
        """The cut graph for arguments of these shapes; None if there is nothing to cut."""
        data = [
            place
            for place, value in enumerate(arguments)
            if isinstance(value, Tensor) and value.ndim and place not in self._module_arguments
        ]
        if not data or not self._returned:
            return None
        elsewhere = next(
            (one.device for one in arguments if isinstance(one, Tensor) and one.device.type != "cpu"), None
        )
        if elsewhere is not None:
            # Autograd has one thread for each GPU. It would wait in this backward for those of the stages: a deadlock.
            raise RequestError(
                f"the model is on {elsewhere} and backend='panpipe' has its stages on threads of the CPU: move model "
                "and batch to the CPU, or use panpipe.pipeline"
            )
        samples, batched = self._batched(arguments, data)
        sizes = microbatch_sizes(samples, self._options.microbatches)
        if not sizes:
            return None
        numbers = self._check.numbers(batched)
        probes = [next(size for size in _PROBES if size != sizes[0])] if len(sizes) > 1 else []
        nodes = {size: self._node_info(arguments, batched, numbers, size, samples) for size in {*sizes, *probes}}
        info = nodes[sizes[0]]
        self._refuse_doubt(arguments, batched, sizes[0], samples)
        if sizes[0] < samples:
            names = {place: self._name(place) for place in data}
            self._check.refuse(arguments, names, self._options.batch_dims, self._options.microbatches)
        stages = cut(self._graph, info, self._options.devices)
        written = [p for p in batched if info[self._arguments[p]].storage in _writes(info)]
        if written:
            raise RequestError(
                f"the model writes its argument '{self._name(written[0])}' in place, but panpipe passes microbatches "
                "to it: work on a copy, such as x.clone()"
            )
        _warn_once(
            "the loss is outside of a compiled model, so all forwards run before all backwards, and every stage holds "
            "the saved tensors of all microbatches; panpipe.pipeline takes the loss inside, and holds less"
        )
        self._warn_of_few_stages(stages)
        random = any(one.draws for one in info.values())
        differentiable = frozenset(node for node in self._returned if info[node].differentiable)
        return CutGraph(stages, sizes, frozenset(batched | numbers), self._returned, differentiable, random)

    def _batched(self, arguments: Sequence[Any], data: Sequence[int]) -> tuple[int, set[int]]:
        """The number of samples, and the positions of the arguments that have them along dimension 0."""
        given, names = self._options.batch_dims, {self._name(place): place for place in data}
        samples = arguments[next((names[n] for n, dim in given.items() if dim == 0 and n in names), data[0])].shape[0]
        free = {place for name, place in names.items() if name not in given and arguments[place].shape[0] == samples}
        return samples, free | {names[name] for name, dim in given.items() if dim == 0 and name in names}

    def _refuse_doubt(self, arguments: Sequence[Any], batched: set[int], size: int, samples: int) -> None:
        """Refuse arguments of unclear meaning: their dimension 0 has the number of samples, but the graph also runs if
        they are not cut.

        Raises:
            RequestError: with its name.
        """
        given = self._options.batch_dims
        free = [place for place in sorted(batched) if self._name(place) not in given] if size < samples else []
        shared = (set(some) for count in range(1, len(batched)) for some in combinations(free, count))
        for some in islice(shared, _MOST_SHARED):
            place, rest = min(some), batched - some
            probe = next(one for one in _PROBES if one != samples)
            try:
                self._node_info(arguments, rest, self._check.numbers(rest), probe, samples)
            except RequestError:
                continue
            raise RequestError(
                f"argument '{self._name(place)}' has {samples} rows, which is the number of samples, but the graph "
                "also runs if all microbatches share it: state which is meant, with options={'batch_dims': "
                f"{{'{self._name(place)}': 0}}}}, or None for what is shared"
            )

    def _warn_of_few_stages(self, stages: Sequence[Stage]) -> None:
        if len(stages) < self._options.devices:
            _warn_once(
                f"a graph has places to cut for {len(stages)} of {self._options.devices} stages: in-place writes and "
                "contexts such as autocast stay whole, and every graph break begins another graph"
            )

    def _node_info(
        self, arguments: Sequence[Any], batched: set[int], numbers: set[int], size: int, samples: int
    ) -> dict[fx.Node, NodeInfo]:
        """Every node for ``size`` samples; refuses outputs that do not have this many rows."""
        values = [size if place in numbers else value for place, value in enumerate(arguments)]
        shapes = {place: (size, *arguments[place].shape[1:]) for place in batched}
        try:
            info = node_info(self._graph, values, shapes)
        except RequestError:
            raise
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise RequestError(f"{self._no_microbatches(batched, size, samples)}: {reason}; {_FIX}") from error
        for node in self._returned:
            shape = info[node].shape
            if not shape and info[node].tensor:
                raise RequestError(
                    f"the compiled model returns '{node.name}', a scalar such as a loss: panpipe joins outputs along "
                    "dimension 0, and cannot know whether a scalar is a mean or a sum; compute it outside of the "
                    "compiled model, or use panpipe.pipeline, which takes the loss inside"
                )
            if not info[node].tensor or shape[0] != size:
                what = f"has shape {shape}" if info[node].tensor else "is no tensor"
                raise RequestError(f"{self._no_microbatches(batched, size, samples)}: '{node.name}' {what}; {_FIX}")
        return info

    def _no_microbatches(self, batched: set[int], size: int, samples: int) -> str:
        names = ", ".join(f"'{self._name(place)}'" for place in sorted(batched))
        return f"the compiled graph, cut along dimension 0 of {names}, runs {samples} samples and not {size}"

    def _name(self, place: int) -> str:
        return str(self._arguments[place].name).removeprefix("l_").removesuffix("_")


_FIX = (
    "its code holds the size of the batch, or an output has another dimension 0: compile with dynamic=True, or mark it "
    "with torch._dynamo.mark_dynamic(x, 0), and give outputs of a batch; panpipe.pipeline does without"
)


class _Pipelined(torch.autograd.Function):
    """A pass as one operator of autograd."""

    @staticmethod
    def forward(ctx: Any, run: Pass, *tensors: Tensor | None) -> Any:
        ctx.run = run
        ctx.set_materialize_grads(False)
        outputs = tuple(run.forward())
        found = zip(run.graph.outputs, outputs, strict=True)
        ctx.mark_non_differentiable(*(value for node, value in found if node not in run.graph.differentiable))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():  # create_graph=True: gradients would silently be constants
            raise RequestError(
                "create_graph=True asks for gradients that can be differentiated, and those of a compiled pipeline "
                "cannot: call the model as it was before torch.compile where a penalty on gradients is computed"
            )
        return (None, *ctx.run.backward(gradients))


def _of_module(node: fx.Node) -> bool:
    """Whether an argument is a parameter, a buffer or a global, and not an argument of the model."""
    known = node.meta.get("grapharg")
    name = str(getattr(getattr(known, "source", None), "name", ""))
    parameter = isinstance(getattr(known, "example", None), nn.Parameter)
    return parameter or name.startswith("G[") or any(part in name for part in _OF_MODULES)


def _writes(info: Mapping[fx.Node, NodeInfo]) -> set[int]:
    return {storage for one in info.values() for storage in one.written}
