"""A stage graph as a module that runs operator by operator, for tracing."""

from typing import Any

from torch import Tensor, fx, nn

from ..graph.nodes import root_of
from ..graph.randomness import KeyedRandom
from ..regions.modes import ModalInterpreter
from ..regions.regions import region_of, run_keyed
from .origins import tagged
from .stage import StageGraph


class StageModule(nn.Module):
    """Runs a stage graph, each random draw at its ordinal in the whole graph."""

    def __init__(self, stage: StageGraph) -> None:
        super().__init__()
        self._stage = stage
        self._runner = _KeyedInterpreter(stage)

    def forward(self, *inputs: Tensor) -> Any:
        return self._runner.run(*inputs)

    @property
    def running(self) -> fx.Node | None:
        """The node that is running, or that raised an error; None before and after the forward."""
        return self._runner.running


class _KeyedInterpreter(ModalInterpreter):
    def __init__(self, stage: StageGraph) -> None:
        super().__init__(fx.GraphModule(stage.modules, stage.graph))
        self._first_draw = stage.first_draw
        self._key: Any = None
        self.extra_traceback = False  # the node that raises an error is `running`
        self.running: fx.Node | None = None

    def run(self, *inputs: Any, **_: Any) -> Any:
        self._key = inputs[-1] if self._first_draw else None
        found = super().run(*inputs)
        self.running = None
        return found

    def run_node(self, n: fx.Node) -> Any:
        self.running = n
        return tagged(root_of(n).name, lambda: self._drawn(n))

    def _drawn(self, n: fx.Node) -> Any:
        if n.name not in self._first_draw:
            return super().run_node(n)
        if region_of(n) is not None:
            (given, number, *_), _ = self.fetch_args_kwargs_from_env(n)
            return run_keyed(given, number, self._key, self._first_draw[n.name])
        with KeyedRandom(self._key, self._first_draw[n.name]):
            return super().run_node(n)
