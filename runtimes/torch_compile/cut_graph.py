"""A graph cut into stages, for arguments of certain shapes, and the plan that runs them.

    model(x)           device 0   F0 F1 F2 F3                  loss.backward()   device 0            B0 B1 B2 B3
                       device 1      F0 F1 F2 F3                                 device 1   B0 B1 B2 B3

The loss is the user's and is computed between the two: the plan has all forwards before all backwards. Without
gradients it has forwards only.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property

from attrs import frozen
from torch import fx

from ...core.capture.programs.stage import Boundary
from ...core.cluster.mesh import Mesh
from ...core.lowering.derive import forward_only
from ...core.plan import plan as plans
from ...core.schedules.gpipe import gpipe
from ...core.schedules.problem import ScheduleProblem
from ..engine.lowered_plan import LoweredPlan, lowered_plan
from ..programs.linked_stage import Layout
from .cutting import Stage
from .node_info import NodeInfo


@frozen(eq=False, slots=False)
class CutGraph:
    """A graph cut into stages, for arguments of certain shapes.

    Args:
        stages: one for each device.
        sizes: samples of each microbatch.
        nodes: samples of a microbatch → shape and dtype of every node.
        batched: positions of the arguments that are cut, and of numbers that are their size.
        outputs: the graph's output nodes, in order.
        random: whether random numbers are drawn.
    """

    stages: Sequence[Stage]
    sizes: Sequence[int]
    nodes: Mapping[int, Mapping[fx.Node, NodeInfo]]
    batched: frozenset[int]
    outputs: Sequence[fx.Node]
    random: bool

    @cached_property
    def sources(self) -> Mapping[fx.Node, int]:
        """Node → the stage that returns it."""
        return {node: number for number, stage in enumerate(self.stages) for node in stage.outgoing}

    def lowered(self, gradients: bool) -> LoweredPlan:
        """The plan, and the lowered actions of its devices.

        Args:
            gradients: whether backwards follow.
        """
        schedule = gpipe(ScheduleProblem(len(self.stages), len(self.sizes)))
        stages = (
            plans.Stage(number, number, tuple(node.name for node in stage.outgoing))
            for number, stage in enumerate(self.stages)
        )
        plan = plans.Plan(
            "torch.compile", "", Mesh(len(self.stages)), len(self.sizes), schedule.name, tuple(stages), (),
            schedule.device_actions,
        )  # fmt: skip
        return lowered_plan(
            plan if gradients else forward_only(plan), [self.layout(size, gradients) for size in self.sizes]
        )

    def layout(self, size: int, gradients: bool) -> Layout:
        """The messages between stages for a microbatch of ``size`` samples."""
        return {
            (src, dst): tuple(self.boundary(node, size, gradients) for node in sent)
            for dst, reader in enumerate(self.stages)
            for src, sender in enumerate(self.stages[:dst])
            if (sent := [node for node in sender.outgoing if node in reader.incoming])
        }

    def boundary(self, node: fx.Node, size: int, gradients: bool) -> Boundary:
        """A node that a stage sends to another, for a microbatch of ``size`` samples."""
        info = self.nodes[size][node]
        return Boundary(node.name, info.shape, info.dtype, gradients and info.differentiable)
