"""Runs the captured graph on fake tensors, to find random draws, layouts, and which tensors get gradients."""

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from ...errors import PanpipeError, RequestError
from ..graph.generated_sources import sources_removed
from ..graph.randomness import KeyedRandom, random_key
from ..python.torch_settings import without_anomaly_mode
from ..regions.modes import CASTS, CastWatch, ModalInterpreter, casts_once
from ..regions.regions import region_of
from ..values.nesting import tensors_of
from ..values.user_lines import line_of, reason_of
from .captured_step import CapturedStep


class FakeRun(ModalInterpreter):
    """Runs the captured graph on fake tensors with autograd enabled.

    Records per node: the fake result with its ``requires_grad``, the ordinal of its first random draw, and whether the
    result or its gradient is not contiguous.
    """

    @sources_removed()
    def __init__(self, step: CapturedStep) -> None:
        module = fx.GraphModule(step.modules, step.graph)
        super().__init__(module, garbage_collect_values=False)
        self.extra_traceback = False  # an error names the line itself
        with step.fake_mode:
            self.random = KeyedRandom(random_key(0, 0, 0))
        self.first_draw: dict[str, int] = {}
        self.values: dict[str, Any] = {}
        self.strided: set[str] = set()
        self._flowed: set[int] = set()
        self._hooked: dict[int, int] = {}
        self._hooks: list[RemovableHandle] = []
        self._nodes = list(step.graph.nodes)
        self._parameters = step.parameters

    def run_node(self, n: fx.Node) -> Any:
        before = self.random.ordinal
        with self.random, CastWatch() if casts_once(n) else nullcontext() as watch:
            value = self._run(n)
        if watch is not None:
            self._note_casts(n, watch.casts)
        region = region_of(n)
        if region is not None:
            self.random.ordinal += region.draws
        if self.random.ordinal != before:
            self.first_draw[n.name] = before
        self.values[n.name] = value
        for tensor in tensors_of(value) if n.op == "call_function" else ():
            key = id(tensor)
            self._note_layout(n.name, tensor)
            if tensor.requires_grad:
                self._hooked[key] = tensor._version
                hook = partial(self._note_flow, n.name, key)
                self._hooks.append(tensor.register_hook(hook))
        return value

    def _run(self, n: fx.Node) -> Any:
        try:
            return super().run_node(n)
        except PanpipeError:
            raise
        except Exception as error:
            raise RequestError(
                f"{line_of(n)}: {n.target} cannot run by itself, outside of the step: {reason_of(error)}; use another "
                "operator"
            ) from error

    def _note_casts(self, n: fx.Node, casts: Mapping[int, torch.dtype]) -> None:
        """Record at an operator the parameters that autocast cast for it, under all their placeholders."""
        read = {s: self.env[s] for s in n.all_input_nodes if s.name in self._parameters}
        found = {self._parameters[s.name]: casts[id(t)] for s, t in read.items() if t.requires_grad and id(t) in casts}
        if found:
            n.meta[CASTS] = {p: found[name] for p, name in self._parameters.items() if name in found}

    def _note_layout(self, name: str, value: Tensor | None) -> None:
        if value is not None and not value.is_contiguous():
            self.strided.add(name)

    def _note_flow(self, name: str, tensor: int, gradient: Tensor | None) -> None:
        self._flowed.add(tensor)
        self._note_layout(name, gradient)

    def note_gradients(self, loss: str) -> None:
        """Run the backward to record the layout of every gradient; tensors without a gradient are detached.

        For instance, a probe whose result is only a metric gets no gradient, and neither do its parameters, as in eager
        PyTorch.
        """
        leaves = [t for t in self.values.values() if isinstance(t, Tensor) and t.requires_grad and t.is_leaf]
        self._flowed.add(id(self.values[loss]))
        try:
            with without_anomaly_mode():
                torch.autograd.grad(self.values[loss], leaves, allow_unused=True)
        except PanpipeError:
            raise
        except Exception as error:  # an operator's own backward may raise any
            raise RequestError(
                f"the step's backward cannot be traced: {reason_of(error)}; use another operator there"
            ) from error
        finally:
            # The graph of autograd, which Python's collector cannot see, would hold this run, and this run its tensors.
            while self._hooks:
                self._hooks.pop().remove()

        def flowing(tensor: Tensor) -> Tensor:
            # After a write in place, the gradient is that of the new value, and the hook of the old one is not called.
            unseen = self._hooked.get(id(tensor)) != tensor._version
            return tensor if not tensor.requires_grad or unseen or id(tensor) in self._flowed else tensor.detach()

        for node in self._nodes:
            if node.op == "call_function":
                self.values[node.name] = pytree.tree_map_only(Tensor, flowing, self.values[node.name])


def fake_inputs(step: CapturedStep) -> list[Any]:
    """The inputs of a run: fake constants, and the fake values of the other placeholders."""
    with step.fake_mode:
        return [
            step.fake_mode.from_tensor(step.constants[node.name]) if node.name in step.constants else node.meta["val"]
            for node in step.graph.nodes
            if node.op == "placeholder"
        ]
