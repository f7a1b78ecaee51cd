"""Grad mode and autocast, which a step sets for parts of it: noted at each operator, so that a cut may go anywhere.

Export would wrap the operators within such a part into one, which no cut can go through. Here the calls that set modes
are taken out of the graph, and every operator runs in the modes that held where it stood.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from attrs import frozen
from torch import fx
from torch._export.passes import replace_autocast_with_hop_pass, replace_set_grad_with_hop_pass

_SETS_GRAD = (torch._C._set_grad_enabled, torch.autograd.grad_mode.set_grad_enabled)
_ENTERS, _EXITS = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast


@frozen
class Modes:
    """Modes that an operator runs in.

    Args:
        grad: whether autograd records it.
        autocasts: arguments of the autocasts around it, outermost first: device type, dtype, enabled, cached.
    """

    grad: bool
    autocasts: tuple[tuple[Any, ...], ...]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for device, dtype, enabled, _cached in self.autocasts:
                # A cached cast would carry one stage's tensors into the next.
                stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=False))
            if not self.grad:
                stack.enter_context(torch.no_grad())
            yield


@contextlib.contextmanager
def modes_as_calls() -> Iterator[None]:
    """Within, export leaves calls that set modes where they are."""

    def leave(module: Any, signature: Any) -> tuple[Any, Any]:
        return module, signature

    with (
        mock.patch.object(replace_autocast_with_hop_pass, "replace_autocast_with_hop_pass", leave),
        mock.patch.object(replace_set_grad_with_hop_pass, "replace_set_grad_with_hop_pass", leave),
    ):
        yield


def note_modes(graph: fx.Graph) -> None:
    """Take calls that set modes out of a graph, and note at every operator which modes it runs in.

    Args:
        graph: a captured graph; changed in place.
    """
    grad, autocasts = True, dict[fx.Node, tuple[Any, ...]]()
    done: list[fx.Node] = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in _SETS_GRAD:
            grad = bool(node.args[0])
            done.append(node)
        elif node.target is _ENTERS:
            autocasts[node] = node.args
            done.append(node)
        elif node.target is _EXITS:
            autocasts.pop(node.args[0])
            done.append(node)
        elif not grad or autocasts:
            node.meta["modes"] = Modes(grad, tuple(autocasts.values()))
    for node in reversed(done):
        graph.erase_node(node)


class ModalInterpreter(fx.Interpreter):
    """Runs every operator of a captured graph in its modes."""

    def run_node(self, n: fx.Node) -> Any:
        modes = n.meta.get("modes")
        if modes is None:
            return super().run_node(n)
        with modes.entered():
            return super().run_node(n)
