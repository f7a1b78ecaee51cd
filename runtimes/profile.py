"""Measuring what a training step costs on the devices at hand: operators, stages and links.

All devices measure at the same time, because they share memory bandwidth and caches.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import evolve
from torch import Tensor, fx, nn

from ..backends.contract import Backend
from ..core.capture.operators import Operators
from ..core.capture.programs import StagePrograms
from ..core.capture.randomness import KeyedRandom, random_key
from ..core.capture.storages import storage_sizes
from ..core.costs import StageCosts
from ..core.graph import OpGraph, OpNode
from .stage_run import Layout, StageRun
from .state import OptimizerFactory, StageState

Values = Mapping[str, Tensor]


def materialised(tensor: Tensor) -> Tensor:
    """The tensor itself, or small random numbers in its shape where it has no data: times do not depend on values."""
    if not tensor.is_meta:
        return tensor.detach()
    like = torch.empty(tensor.shape, dtype=tensor.dtype)
    return like.normal_(0, 0.02) if tensor.is_floating_point() else like.zero_()


def profile_operators(
    operators: Operators, parameters: Values, buffers: Values, leaves: Sequence[Any], repeats: int = 5
) -> OpGraph:
    """Time every operator of one microbatch: F, and its backward towards inputs and towards parameters.

    Args:
        operators: the captured step's operators.
        parameters, buffers: by qualified name; may be on meta.
        leaves: one real microbatch, flattened.
        repeats: how often each is timed; the median counts.

    Returns:
        The graph with times and saved bytes filled in.
    """
    runner = _OperatorTimer(operators, parameters, buffers, leaves, repeats)
    nodes = tuple(runner.time(node) for node in operators.graph.nodes)
    return evolve(operators.graph, nodes=nodes)


class _OperatorTimer:
    def __init__(
        self, operators: Operators, parameters: Values, buffers: Values, leaves: Sequence[Any], repeats: int
    ) -> None:
        step = operators.step
        self._operators = operators
        self._repeats = repeats
        self._interpreter = fx.Interpreter(fx.GraphModule(step.modules, step.graph), garbage_collect_values=False)
        self._key = random_key(0, 0, 0)
        self._seen: set[int] = set()
        env = self._interpreter.env
        for node in step.graph.nodes:
            if node.op == "placeholder":
                if node.name in step.parameters:
                    value = materialised(parameters[step.parameters[node.name]])
                    env[node] = value.requires_grad_(operators.values[node.name].requires_grad)
                elif node.name in step.buffers:
                    env[node] = materialised(buffers[step.buffers[node.name]]).clone()
                elif node.name in step.constants:
                    env[node] = step.constants[node.name]
                elif node.name in step.batch:
                    env[node] = leaves[step.batch[node.name]]
            elif node.op == "get_attr":
                env[node] = step.modules[str(node.target)]
        self._seen.update(storage_sizes(env.values()))
        with torch.no_grad():
            for node in step.graph.nodes:
                if node.name in operators.local:
                    env[node] = self._interpreter.run_node(node)

    def _run(self, members: Sequence[str]) -> None:
        with KeyedRandom(self._key):
            for name in members:
                node = self._operators.nodes[name]
                self._interpreter.env[node] = self._interpreter.run_node(node)

    def time(self, op: OpNode) -> OpNode:
        members = self._operators.members[op.name]
        env, nodes = self._interpreter.env, [self._operators.nodes[name] for name in members]
        inside = set(nodes)
        sources = [s for s in dict.fromkeys(s for n in nodes for s in n.all_input_nodes) if s not in inside]
        activations = [s for s in sources if s.name in self._operators.owner]
        forward, back_input, back_weight = [], [], []
        saved: list[Tensor] = []
        # One run that is not timed warms caches up and tells what is saved.
        for repeat in range(self._repeats + 1):
            for s in activations:
                env[s] = _leaf(env[s])
            pack: Callable[[Tensor], Tensor] = lambda t, keep=repeat == 0: (saved.append(t) if keep else None) or t  # noqa: E731
            start = time.perf_counter()
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                self._run(members)
            times = [time.perf_counter() - start]
            times += self._backward(nodes, activations, sources, env)
            if repeat:
                for series, value in zip((forward, back_input, back_weight), times, strict=True):
                    series.append(value)
        for node in nodes:
            env[node] = _detached(env[node])
        fresh = {key: size for key, size in storage_sizes(saved).items() if key not in self._seen}
        self._seen.update(fresh)
        return evolve(
            op, forward_s=statistics.median(forward), backward_input_s=statistics.median(back_input),
            backward_weight_s=statistics.median(back_weight), saved_bytes=sum(fresh.values()),
        )  # fmt: skip

    def _backward(
        self, nodes: list[fx.Node], activations: list[fx.Node], sources: list[fx.Node], env: dict[fx.Node, Any]
    ) -> list[float]:
        inside = set(nodes)
        outputs = [
            t for n in nodes if not set(n.users) <= inside or not n.users for t in _flat(env[n]) if t.requires_grad
        ]
        outputs = [t for t in outputs if t.grad_fn is not None]
        parameters = [env[s] for s in sources if s.op == "placeholder" and s.name in self._operators.step.parameters]
        wanted = [
            [t for s in activations for t in _flat(env[s]) if t.requires_grad],
            [p for p in parameters if p.requires_grad],
        ]
        if not outputs:
            return [0.0, 0.0]
        gradients = [torch.ones_like(t) for t in outputs]
        times = []
        for i, towards in enumerate(wanted):
            start = time.perf_counter()
            if towards:
                torch.autograd.grad(outputs, towards, gradients, retain_graph=i == 0, allow_unused=True)
            times.append(time.perf_counter() - start if towards else 0.0)
        return times


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for v in value for t in _flat(v)] if isinstance(value, tuple | list) else []


def _leaf(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad or value.is_floating_point())
    return type(value)(_leaf(v) for v in value) if isinstance(value, tuple | list) else value


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    return type(value)(_detached(v) for v in value) if isinstance(value, tuple | list) else value


def profile_stages(
    programs: Mapping[int, StagePrograms], layout: Layout, operators: Operators, parameters: Values, buffers: Values,
    leaves: Sequence[Any], optimizer: OptimizerFactory | None, repeats: int = 7,
) -> dict[int, StageCosts]:  # fmt: skip
    """Time the programs of stages, with what the executor does around them.

    Args:
        programs: by stage index.
        layout: the tensors of every message.
        operators: the captured step's operators.
        parameters, buffers: by qualified name; may be on meta. They are not changed.
        leaves: one real microbatch.
        optimizer: makes an optimizer; None where the stages are not trained.
        repeats: how often each is timed, after one run that is not.

    Returns:
        Costs by stage index.
    """
    costs = {}
    for index, stage in programs.items():
        own = {
            name: nn.Parameter(materialised(parameters[name]).clone(), requires_grad=parameters[name].requires_grad)
            for name in stage.inputs.parameters
        }
        state = StageState(own, {n: materialised(buffers[n]).clone() for n in stage.inputs.buffers}, optimizer)
        run = StageRun(index, stage, layout, state, operators.step.constants, operators.step.outputs.loss)
        costs[index] = _stage_costs(run, _stand_ins(stage), tuple(leaves), repeats)
    return costs


def _stand_ins(stage: StagePrograms) -> list[Tensor]:
    """Random tensors in the shapes of what earlier stages send; zeros for integers, which are indices somewhere."""
    return [
        torch.randn(b.shape, dtype=b.dtype) if b.dtype.is_floating_point else torch.zeros(b.shape, dtype=b.dtype)
        for b in stage.inputs.boundary
    ]


def _stage_costs(run: StageRun, boundary: list[Tensor], leaves: tuple[Any, ...], repeats: int) -> StageCosts:
    key, seed = random_key(0, 0, 0), torch.ones(())
    programs = run.programs
    series: dict[str, list[float]] = {"F": [], "B": [], "I": [], "W": []}
    halves = programs.backward_input is not None and programs.backward_weight is not None

    def timed(kind: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = work()
        run.settle()
        series[kind].append(time.perf_counter() - start)
        return result

    with torch.no_grad():
        for _ in range(repeats + 1):
            outputs, _results = timed("F", lambda: run.forward(0, list(boundary), leaves, key))
            tangents = {i: torch.ones_like(outputs[i]) for i in run.tangents}
            timed("B", lambda tangents=tangents: run.backward(0, tangents, seed, leaves, key))
            if halves:
                run.forward(0, list(boundary), leaves, key)
                timed("I", lambda tangents=tangents: run.backward_input(0, tangents, seed, leaves, key))
                timed("W", lambda: run.backward_weight(0, seed, leaves, key))
    median = {kind: statistics.median(times[1:]) if times[1:] else 0.0 for kind, times in series.items()}
    optimizer_s, optimizer_bytes = _optimizer_costs(run.state)
    size = sum(p.nbytes for p in run.state.parameters.values())
    memory = programs.memory
    # Without I and W of its own, a stage does all of its backward in the one that the executor does it in.
    first, second = (median["I"], median["W"]) if halves else (median["B"], 0.0) if run.returned else (0.0, median["B"])
    return StageCosts(
        forward_s=median["F"], backward_input_s=first, backward_weight_s=second, backward_s=median["B"],
        optimizer_s=optimizer_s, parameter_bytes=size,
        gradient_bytes=sum(p.nbytes for p in run.state.parameters.values() if p.requires_grad),
        optimizer_bytes=optimizer_bytes, saved_bytes=memory.saved, freed_by_input_bytes=memory.freed_by_input,
        created_by_input_bytes=memory.created_by_input, workspace_bytes=memory.workspace,
    )  # fmt: skip


def _optimizer_costs(state: StageState) -> tuple[float, int]:
    """Time of a step, and bytes of the optimizer's state. The state is the profile's own copy."""
    if state.optimizer is None:
        return 0.0, 0
    for parameter in state.parameters.values():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    times = []
    for _ in range(4):
        start = time.perf_counter()
        state.step()
        times.append(time.perf_counter() - start)
    held = [value for per in state.optimizer.state.values() for value in per.values()]
    return statistics.median(times[1:]), sum(storage_sizes(held).values())


def profile_link(
    backend: Backend, sizes: Sequence[int] = (64, 1 << 16, 1 << 18, 1 << 20, 1 << 22), repeats: int = 20
) -> tuple[float, float]:
    """Latency and bandwidth between neighbouring devices, by ping-pong between each even device and the next.

    Args:
        backend: this device's end of the transport.
        sizes: bytes of the messages.
        repeats: round trips for each size; the median counts.

    Returns:
        (latency in seconds, bytes per second) of one direction, from a least-squares line; devices without a partner
        return (0, 0).
    """
    peer = backend.device ^ 1
    if peer >= backend.devices:
        return 0.0, 0.0
    one_way = []
    for size in sizes:
        message, times = [torch.zeros(size, dtype=torch.uint8)], []
        answer = [torch.empty(size, dtype=torch.uint8)]
        for _ in range(repeats):
            start = time.perf_counter()
            if backend.device < peer:
                sent = backend.send(message, peer)
                backend.receive(answer, peer).wait()
                sent.wait()
            else:
                backend.receive(answer, peer).wait()
                backend.send(message, peer).wait()
            times.append(time.perf_counter() - start)
        one_way.append(statistics.median(times) / 2)
    xs, ys = list(map(float, sizes)), one_way
    slope, intercept = statistics.linear_regression(xs, ys)
    return max(intercept, min(ys) / 2), 1 / max(slope, 1e-12)
