"""Grad mode and autocast, which a step sets for parts of it: recorded at each operator, so that any cut is possible.

Export would wrap the operators of such a part into one operator, which cannot be cut. Here the calls that set modes are
removed from the graph, and every operator runs in the modes that were active at its position.

Within its outermost block autocast casts a parameter once for all readers, and its gradients are accumulated in the
lower precision. This does not happen in a traced graph, where autocast sees no leaf tensors. So casts of parameters are
recorded at each operator, too, and a stage casts each parameter once for all its operators of a block.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from attrs import frozen
from torch import fx
from torch._export.passes import replace_autocast_with_hop_pass, replace_set_grad_with_hop_pass
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode

from .regions import region_of

_SETS_GRAD = (torch._C._set_grad_enabled, torch.autograd.grad_mode.set_grad_enabled)
_ENTERS, _EXITS = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast


@frozen
class Modes:
    """The modes in which an operator runs.

    Args:
        grad: whether autograd records it.
        autocasts: arguments of the active autocasts, outermost first: device type, dtype, enabled, cached.
        block: number of the outermost one in the graph.
    """

    grad: bool
    autocasts: tuple[tuple[Any, ...], ...]
    block: int = 0

    @property
    def casts_once(self) -> bool:
        """Whether a parameter is cast once for all operators of the block."""
        return bool(self.autocasts) and self.autocasts[-1][3] is not False

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The modes for one operator, without a cache of casts."""
        with self.autocast(cached=False), contextlib.nullcontext() if self.grad else torch.no_grad():
            yield

    @contextlib.contextmanager
    def autocast(self, cached: bool) -> Iterator[None]:
        """The autocasts alone; casts are cached only if ``cached``."""
        with contextlib.ExitStack() as stack:
            for device, dtype, enabled, wanted in self.autocasts:
                stack.enter_context(torch.autocast(device, dtype, enabled, cached and wanted is not False))
            yield


@contextlib.contextmanager
def modes_as_calls() -> Iterator[None]:
    """Within this context export keeps calls that set modes in the graph, with whether casts are cached."""

    def leave(module: Any, signature: Any) -> tuple[Any, Any]:
        return module, signature

    with (
        mock.patch.object(replace_autocast_with_hop_pass, "replace_autocast_with_hop_pass", leave),
        mock.patch.object(replace_set_grad_with_hop_pass, "replace_set_grad_with_hop_pass", leave),
        # A tracer disables the cache, which would be the default of every autocast in the step.
        mock.patch.object(torch, "is_autocast_cache_enabled", return_value=True),
        # Export does not record calls of inference_mode; no_grad computes the same.
        mock.patch.object(torch.inference_mode, "__enter__", _enter_inference),
        mock.patch.object(torch.inference_mode, "__exit__", _exit_inference),
    ):
        yield


def _enter_inference(mode: Any) -> None:
    mode.prev = torch.is_grad_enabled()
    if mode.mode:
        torch._C._set_grad_enabled(False)


def _exit_inference(mode: Any, *_failure: Any) -> None:
    torch._C._set_grad_enabled(mode.prev)


def note_modes(graph: fx.Graph) -> None:
    """Remove calls that set modes from a graph, and record at every operator the modes in which it runs.

    Args:
        graph: a captured graph; changed in place.
    """
    grad, autocasts = True, dict[fx.Node, tuple[Any, ...]]()
    done: list[fx.Node] = []
    blocks = 0
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in _SETS_GRAD:
            grad = bool(node.args[0])
            done.append(node)
        elif node.target is _ENTERS:
            blocks += not autocasts
            autocasts[node] = node.args
            done.append(node)
        elif node.target is _EXITS:
            autocasts.pop(node.args[0])
            done.append(node)
        elif not grad or autocasts:
            modes = node.meta["modes"] = Modes(grad, tuple(autocasts.values()), blocks)
            if (region := region_of(node)) is not None:
                region.autocast = partial(modes.autocast, cached=True)
    for node in reversed(done):
        graph.erase_node(node)


CASTS = "autocast casts"
"""Key of a node's metadata: the parameters that autocast casts for it → the dtype."""

_OWN_CASTS = ("to", "_to_copy", "type_as")
"""Operators that cast explicitly."""


class CastWatch(TorchDispatchMode):
    """A mode that records casts.

    Attributes:
        casts: identity of a tensor → the dtype that it was last cast to.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.casts: dict[int, torch.dtype] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and (dtype := (kwargs or {}).get("dtype")) is not None:
            self.casts[id(args[0])] = dtype
        return func(*args, **(kwargs or {}))


def casts_once(node: fx.Node) -> bool:
    """Whether autocast casts the parameters that an operator reads, and each once for all operators of a block."""
    modes: Modes | None = node.meta.get("modes")
    return modes is not None and modes.casts_once and getattr(node.target, "_opname", None) not in _OWN_CASTS


class ModalInterpreter(fx.Interpreter):
    """Runs every operator of a captured graph in its modes."""

    _lower: dict[tuple[int, str, torch.dtype, bool], Any] | None = None

    def run(self, *args: Any, **options: Any) -> Any:
        self._lower = {}
        try:
            return super().run(*args, **options)
        finally:
            self._lower = None

    def run_node(self, n: fx.Node) -> Any:
        modes = n.meta.get("modes")
        if modes is None:
            return super().run_node(n)
        with modes.entered():
            return super().run_node(n)

    def map_nodes_to_values(self, args: Any, n: fx.Node) -> Any:
        casts = n.meta.get(CASTS)
        if casts is None or self._lower is None:
            return super().map_nodes_to_values(args, n)
        modes, lower = n.meta["modes"], self._lower

        def load(source: fx.Node) -> Any:
            if source.name not in casts:
                return self.env[source]
            key = modes.block, source.name, casts[source.name], modes.grad
            if key not in lower:
                lower[key] = self.env[source].to(casts[source.name])
            return lower[key]

        return map_arg(args, load)
