"""Runs a cut graph on threads: the call of the model runs all forwards, the loss's backward all backwards.

Each stage has a thread, and runs a microbatch after the neighbour that it depends on::

    model(x)           thread 0   F0 F1 F2 F3                  loss.backward()   thread 0            B0 B1 B2 B3
                       thread 1      F0 F1 F2 F3                                 thread 1   B0 B1 B2 B3

The loss is the user's and is computed between the two: all forwards run before all backwards. Between them a `Pass`
holds the saved tensors: F runs the graph under autograd, autograd computes B, and its graph holds them. Several calls
of the model may come before their backwards.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from threading import Lock
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, fx

from ...core.capture.graph.randomness import KeyedRandom, random_key
from ...core.errors import RequestError
from .cutting import CutGraph

Work = Callable[[int, int], None]
"""Called with a stage and a microbatch."""


class StageThreads:
    """The threads of the stages. They run half of one pass at a time: halves of several would wait for each other."""

    def __init__(self, count: int) -> None:
        self._threads = ThreadPoolExecutor(count, "panpipe stage", torch.set_num_threads, (1,))
        self._lock = Lock()

    def run(self, work: Work, stages: Sequence[int], microbatches: int) -> None:
        """Call ``work`` for each microbatch of each stage, in parallel; an error of one of them is raised.

        Args:
            stages: in the order in which a microbatch goes through them.
        """
        done = [[Future[None]() for _ in range(microbatches)] for _ in stages]

        def run_stage(place: int) -> None:
            for m in range(microbatches):
                try:
                    if place:
                        done[place - 1][m].result()
                    work(stages[place], m)
                except BaseException as failure:
                    for later in done[place][m:]:
                        later.set_exception(failure)
                    raise
                done[place][m].set_result(None)

        with self._lock:
            running = [self._threads.submit(run_stage, place) for place in range(len(stages))]
            wait(running)
        for each in running:
            each.result()


@define(eq=False)
class _Forward:
    """What B of a microbatch needs of F, at one stage.

    Args:
        leaves: node, or position of an argument → the leaf whose gradient B computes.
        values: outgoing node → its value.
    """

    leaves: dict[Any, Tensor]
    values: dict[fx.Node, Tensor]


@define(eq=False)
class Pass:
    """One forward and its backward.

    Args:
        gradients: whether a backward follows.
    """

    graph: CutGraph
    threads: StageThreads
    arguments: Sequence[Any]
    gradients: bool
    key: tuple[int, int] = (0, 0)
    _held: dict[tuple[int, int], _Forward] = field(factory=dict, init=False)
    _shared: dict[tuple[int, int], Tensor] = field(factory=dict, init=False)
    """(stage, position) → the leaf of an argument that is not cut: one for all microbatches, so that autocast casts it
    once. Its whole gradient goes to the user's tensor, whose hooks autograd then calls."""

    def forward(self) -> list[Tensor]:
        """Run all forwards. Returns the graph's outputs for the whole batch."""
        graph, pieces = self.graph, self._pieces()
        sent: list[dict[fx.Node, Tensor]] = [{} for _ in pieces]
        kind = next(value.device.type for value in self.arguments if isinstance(value, Tensor))
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

        def work(number: int, m: int) -> None:
            stage, held = graph.stages[number], _Forward({}, {})
            with ExitStack() as contexts:
                contexts.enter_context(torch.autocast(kind, dtype, enabled=enabled))
                contexts.enter_context(torch.set_grad_enabled(self.gradients))
                given = [self._argument(number, place, pieces[m][place], held) for place in stage.arguments]
                for node in stage.incoming:
                    given.append(sent[m][node].detach().requires_grad_(sent[m][node].requires_grad))
                    if given[-1].requires_grad:
                        held.leaves[node] = given[-1]
                if graph.random:
                    contexts.enter_context(KeyedRandom(random_key(*self.key, m), stage.first_draw))
                held.values = dict(zip(stage.outgoing, stage.module(*given), strict=True))
            sent[m] |= {n: value.detach().requires_grad_(value.requires_grad) for n, value in held.values.items()}
            if self.gradients:
                self._held[number, m] = held

        self.threads.run(work, range(len(graph.stages)), len(pieces))
        return [torch.cat([found[node].detach() for found in sent]) for node in graph.outputs]

    def _argument(self, number: int, place: int, value: Any, held: _Forward) -> Any:
        if not isinstance(value, Tensor) or not value.requires_grad:
            return value
        leaf = value.detach().requires_grad_(self.gradients)
        if place not in self.graph.batched:
            leaf = self._shared.setdefault((number, place), leaf)
        if self.gradients:
            held.leaves[place] = leaf
        return leaf

    def _pieces(self) -> list[list[Any]]:
        """The arguments of each microbatch, with its rows of those that are cut."""
        pieces, start = list[list[Any]](), 0
        with torch.inference_mode(False), torch.no_grad():
            for size in self.graph.sizes:
                pieces.append([self._rows(place, value, start, size) for place, value in enumerate(self.arguments)])
                start += size
        return pieces

    def _rows(self, place: int, value: Any, start: int, size: int) -> Any:
        if place not in self.graph.batched:
            return value
        if not isinstance(value, Tensor):
            return size
        return value.detach().narrow(0, start, size).requires_grad_(value.requires_grad)

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run all backwards.

        Returns:
            The gradient of each argument; None for those without one.

        Raises:
            RequestError: it was called before.
        """
        graph, held = self.graph, self._held
        if not held:
            raise RequestError(
                "backward is called a second time, but panpipe has freed the saved tensors: call the model again"
            )
        self._held, self._shared, count = {}, {}, len(graph.sizes)
        given = {
            node: g.split(list(graph.sizes)) for node, g in zip(graph.outputs, gradients, strict=True) if g is not None
        }
        returned: list[dict[fx.Node, Tensor]] = [{} for _ in graph.sizes]
        found: list[dict[int, list[Tensor | None]]] = [{} for _ in graph.stages]

        def work(number: int, m: int) -> None:
            one, ends = held.pop((number, m)), {}
            for node, value in one.values.items():
                parts = [given[node][m]] if node in given else []
                parts += [returned[m].pop(node)] if node in returned[m] else []
                if parts and value.requires_grad:
                    ends[node] = sum(parts[1:], parts[0])
            computed: Sequence[Tensor | None] = [None] * len(one.leaves)
            if ends and one.leaves:
                values = [one.values[node] for node in ends]
                computed = torch.autograd.grad(values, [*one.leaves.values()], [*ends.values()], allow_unused=True)
            for key, gradient in zip(one.leaves, computed, strict=True):
                if not isinstance(key, fx.Node):
                    _add(found[number].setdefault(key, []), gradient, cut=key in graph.batched)
                elif gradient is not None:
                    returned[m][key] = returned[m][key] + gradient if key in returned[m] else gradient

        self.threads.run(work, range(len(graph.stages))[::-1], count)
        return [self._gradient(place, found) for place in range(len(self.arguments))]

    def _gradient(self, place: int, by_stage: Sequence[Mapping[int, list[Tensor | None]]]) -> Tensor | None:
        """The sum of the gradients of an argument over the stages that read it."""
        sums: list[Tensor | None] = []
        for row in zip(*(one[place] for one in by_stage if place in one), strict=True):
            defined = [gradient for gradient in row if gradient is not None]
            sums.append(sum(defined[1:], defined[0]) if defined else None)
        if not sums or all(one is None for one in sums):
            return None
        if place not in self.graph.batched:
            return sums[0]
        pieces = self.arguments[place].detach().split(list(self.graph.sizes))
        return torch.cat([torch.zeros_like(p) if g is None else g for g, p in zip(sums, pieces, strict=True)])


def _add(kept: list[Tensor | None], gradient: Tensor | None, cut: bool) -> None:
    """Add the gradient of an argument for one microbatch: of each if it is cut, otherwise to their sum."""
    if cut or not kept:
        kept.append(gradient)
    elif gradient is not None:
        kept[0] = gradient if kept[0] is None else kept[0] + gradient
