"""Settings of a search: chains of operators on equal devices."""

from collections.abc import Sequence

from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode
from panpipe.core.search.problem.setting import Setting, one_setting


def setting_of(
    forward_s: Sequence[float],
    *,
    devices: int = 2,
    microbatches: int = 4,
    saved: int = 0,
    memory: float = 1e6,
    backward: bool = False,
) -> Setting:
    """A chain of operators with these times of F, each of which saves as many bytes, over links without any delay.

    Args:
        forward_s: of each operator.
        devices: how many there are.
        microbatches: in a step.
        saved: bytes that each operator saves.
        memory: bytes of each device.
        backward: whether I and W take as long as F each; else they take no time.
    """
    nodes = tuple(
        OpNode(f"n{i}", time, time * backward, time * backward, saved_bytes=saved) for i, time in enumerate(forward_s)
    )
    edges = tuple(OpEdge(f"n{i}", f"n{i + 1}", 0) for i in range(len(nodes) - 1))
    cluster = fully_connected(devices, memory, float("inf"), 0.0)
    return one_setting(OpGraph(nodes, edges), cluster, microbatches, (memory,) * devices, None)
