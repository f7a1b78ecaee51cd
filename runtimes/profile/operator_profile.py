"""Measures the costs of every operator of a training step on the device at hand.

Operators that do the same work, such as those of equal layers, get one time: the shortest of a few of them. This takes
less time than measuring all, and gives equal layers equal times.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from attrs import define, evolve
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from ...core.analytic.single_operator import LoneOperator
from ...core.capture.export.operators import Operators
from ...core.capture.graph.generated_sources import sources_removed
from ...core.capture.graph.randomness import KeyedRandom, random_key
from ...core.capture.graph.storages import storage_sizes
from ...core.capture.programs.stage import with_device
from ...core.capture.regions.modes import ModalInterpreter
from ...core.capture.values.fake_tensors import stand_in_for
from ...core.capture.values.nesting import tensors_of
from ...core.capture.values.user_lines import line_of, message_start
from ...core.costs.graph import OpGraph, OpNode
from ...core.errors import RequestError, in_a_line
from ..devices.compute import Stopwatch, compute_device
from ..programs.stage_run import constant_on
from ..watch.activity import HERE

Values = Mapping[str, Tensor]
Span = tuple[Any, Any]
"""Start and end, as times of a stopwatch."""
TIMED = 3
"""Number of timed operators among those that do the same work: a short disturbance does not affect all of them."""


def materialised(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, or random values for one on meta."""
    return stand_in_for(tensor, device) if tensor.is_meta else tensor.detach().to(device)


def profile_operators(
    operators: Operators,
    parameters: Values,
    buffers: Values,
    leaves: Sequence[Any],
    repeats: int = 5,
    device: torch.device | None = None,
) -> OpGraph:
    """Time every operator of one microbatch: F, and its backward for inputs and for parameters.

    Args:
        parameters, buffers: by qualified name; may be on meta. Parameters on meta get random values only while their
            operator is measured: all of them together may exceed the memory.
        repeats: number of timed runs of each kind of work; the shortest counts.
        device: the device that runs them, of the type that the step was captured for; by default the model's.

    Returns:
        The graph with times and saved bytes.
    """
    device = device or compute_device([*parameters.values(), *buffers.values()])
    watch = Stopwatch(device)
    with watch.active():
        runner = _OperatorTimer(operators, parameters, buffers, leaves, repeats, device, watch)
        saved = [runner.time(node) for node in operators.graph.nodes]
        nodes = tuple(runner.timed(node, *sizes) for node, sizes in zip(operators.graph.nodes, saved, strict=True))
    return evolve(operators.graph, nodes=nodes)


@define(eq=False, slots=False)
class _OperatorTimer:
    """Runs the operators of a captured step one after another, and times some of each kind of work.

    Arguments as of `profile_operators`; ``watch`` takes the times.
    """

    _operators: Operators
    _parameters: Values
    _buffers: Values
    _leaves: Sequence[Any]
    _runs: int
    _device: torch.device
    _watch: Stopwatch

    def __attrs_post_init__(self) -> None:
        operators, device = self._operators, self._device
        step = operators.step
        self._keys = {node.name: LoneOperator(operators, node.name).key for node in operators.graph.nodes}
        counts = Counter(self._keys.values())
        self._left = {key: min(count, TIMED) for key, count in counts.items()}
        self._repeats = {key: -(-self._runs // timed) for key, timed in self._left.items()}
        self._spans: dict[Hashable, tuple[list[Span | None], ...]] = {key: ([], [], []) for key in counts}
        interpreter = ModalInterpreter if device.type == "cpu" else partial(_OnDevice, device)
        with sources_removed():
            self._interpreter = interpreter(fx.GraphModule(step.modules, step.graph), garbage_collect_values=False)
        self._key = random_key(0, 0, 0)
        self._seen: set[int] = set()
        self._of_placeholder = {placeholder: self._parameters[name] for placeholder, name in step.parameters.items()}
        self._last_reader = {
            source: op.name
            for op in operators.graph.nodes
            for member in operators.members[op.name]
            for source in (operators.nodes[member], *operators.nodes[member].all_input_nodes)
        }
        env = self._interpreter.env
        for node in step.graph.nodes:
            if node.op == "placeholder":
                if node.name in step.buffers:
                    env[node] = materialised(self._buffers[step.buffers[node.name]], device).clone()
                elif node.name in step.constants:
                    env[node] = constant_on(step.constants[node.name], device)
                elif node.name in step.batch:
                    leaf = self._leaves[step.batch[node.name]]
                    env[node] = leaf.to(device) if isinstance(leaf, Tensor) else leaf
            elif node.op == "get_attr":
                env[node] = step.modules[str(node.target)]
        self._seen.update(storage_sizes(env.values()))
        with torch.no_grad():
            for node in step.graph.nodes:
                if node.name in operators.local:
                    env[node] = self._interpreter.run_node(node)

    def _run(self, members: Sequence[str], saved: list[Tensor] | None = None) -> None:
        """Run an operator; ``saved`` gets the tensors that it saves for the backward."""

        def keep(tensor: Tensor) -> Tensor:
            assert saved is not None
            saved.append(tensor)
            return tensor

        env, nodes = self._interpreter.env, [self._operators.nodes[name] for name in members]
        hooks = nullcontext() if saved is None else torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t)
        try:
            with KeyedRandom(self._key), torch.enable_grad(), hooks:
                for node in nodes:
                    env[node] = self._interpreter.run_node(node)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            if saved is None or "support saved tensor hooks" not in str(error):
                raise RequestError(
                    f"{message_start(line_of(node))}the step fails with the example batch: {in_a_line(error)}; change "
                    "that line, or the batch"
                ) from error
            # Python code with torch.func.jacrev or the like counts as if it saved what it reads.
            saved += [t for node in nodes for s in node.all_input_nodes if s in env for t in tensors_of(env[s])]
            self._run(members)

    def time(self, op: OpNode) -> tuple[int, int]:
        """Run an operator, timed if its kind of work needs more runs. Returns the bytes that it saves for each
        microbatch, and for all together."""
        HERE.doing(f"measuring '{op.name}'")
        key = self._keys[op.name]
        repeats = self._repeats[key] if self._left[key] > 0 else 0
        self._left[key] -= 1
        members = self._operators.members[op.name]
        env, nodes = self._interpreter.env, [self._operators.nodes[name] for name in members]
        inside = set(nodes)
        sources = [s for s in dict.fromkeys(s for n in nodes for s in n.all_input_nodes) if s not in inside]
        activations = [s for s in sources if s.name in self._operators.owner]
        parameters = [s for s in sources if s.name in self._of_placeholder]
        for s in parameters:
            own = materialised(self._of_placeholder[s.name], self._device)
            env[s] = own.requires_grad_(self._operators.values[s.name].requires_grad)
        known = self._seen | storage_sizes(env[s] for s in parameters).keys()
        saved: list[Tensor] = []
        # One run that is not timed warms up caches and determines the saved tensors.
        for repeat in range(repeats + 1):
            for s in activations:
                env[s] = _leaf(env[s], self._operators.values[s.name])
            start = self._watch.now()
            self._run(members, saved if repeat == 0 else None)
            times: list[Span | None] = [(start, self._watch.now())]
            if repeats:
                times += self._backward(nodes, activations, parameters, env)
            if repeat:
                for kind, value in zip(self._spans[key], times, strict=True):
                    kind.append(value)
        for node in nodes:
            env[node] = tree_map_only(Tensor, Tensor.detach, env[node])
        fixed = [s for s in (*activations, *nodes) if s.name in self._operators.fixed]
        once = storage_sizes(tensor for s in fixed for tensor in tensors_of(env[s]))
        fresh = {key: size for key, size in storage_sizes(saved).items() if key not in known}
        for node in [*parameters, *(n for n in (*sources, *nodes) if self._done(n, op))]:
            env.pop(node, None)
        # The addresses of freed storages may be reused.
        self._seen = (self._seen | fresh.keys()) & storage_sizes(t for v in env.values() for t in tensors_of(v)).keys()
        shared = sum(size for key, size in fresh.items() if key in once)
        return sum(fresh.values()) - shared, shared

    def timed(self, op: OpNode, saved_bytes: int, shared_bytes: int) -> OpNode:
        """The operator with the times of its kind of work."""
        forward, towards_inputs, towards_weights = self._spans[self._keys[op.name]]
        return evolve(
            op, forward_s=self._fastest(forward), backward_input_s=self._fastest(towards_inputs),
            backward_weight_s=self._fastest(towards_weights), saved_bytes=saved_bytes,
            shared_bytes=shared_bytes,
        )  # fmt: skip

    def _fastest(self, spans: Sequence[Span | None]) -> float:
        """The shortest of all repeats, in seconds: noise only makes them longer. Only this waits for the device."""
        return min((0.0 if span is None else self._watch.between(*span) for span in spans), default=0.0)

    def _done(self, node: fx.Node, op: OpNode) -> bool:
        """Whether this was the last operator that reads an activation."""
        return node.name in self._operators.owner and self._last_reader[node] == op.name

    def _backward(
        self, nodes: list[fx.Node], activations: list[fx.Node], parameters: list[fx.Node], env: dict[fx.Node, Any]
    ) -> list[Span | None]:
        inside = set(nodes)
        outputs = [
            t for n in nodes if not set(n.users) <= inside or not n.users for t in tensors_of(env[n]) if t.requires_grad
        ]
        outputs = [t for t in outputs if t.grad_fn is not None]
        wanted = [
            [t for s in activations for t in tensors_of(env[s]) if t.requires_grad],
            [env[s] for s in parameters if env[s].requires_grad],
        ]
        if not outputs:
            return [None, None]
        if wanted[0] and any(getattr(node.target, "_opname", "") in _NORMALISATIONS for node in nodes):
            wanted = [[*wanted[0], *wanted[1]], []]
        gradients = [torch.ones_like(t) for t in outputs]
        times: list[Span | None] = []
        for i, towards in enumerate(wanted):
            start = self._watch.now()
            if towards:
                torch.autograd.grad(outputs, towards, gradients, retain_graph=i == 0, allow_unused=True)
            times.append((start, self._watch.now()) if towards else None)
        return times


_NORMALISATIONS = {"batch_norm", "group_norm", "instance_norm", "layer_norm", "rms_norm"}
"""Their backward is one operator, in I alone (see `joint_graph`). Where that of a group norm in channels_last
computes the parameters' gradients alone, torch 2.13 crashes on a CPU."""


class _OnDevice(ModalInterpreter):
    """Runs a captured graph on another device of the same type."""

    def __init__(self, device: torch.device, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._device = device

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(target, with_device(args, self._device), with_device(kwargs, self._device))


def _leaf(value: Any, captured: Any) -> Any:
    """A result as an input of other operators: it requires a gradient where the captured one does."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(captured.requires_grad)
    return type(value)(map(_leaf, value, captured)) if isinstance(value, tuple | list) else value
