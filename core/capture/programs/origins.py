"""Tags each node of a traced graph with the captured value that it comes from."""

from collections.abc import Callable
from typing import Any

from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode

CAPTURED = "captured"
"""Where a joint node's metadata has the name of the captured value that it was traced from."""


def tagged(name: str, run: Callable[[], Any]) -> Any:
    """Run a captured node; the nodes that it adds to a graph that is being traced are tagged.

    Args:
        name: the tag: of the value whose storage the node shows.
        run: runs it.
    """
    mode = get_proxy_mode()
    if mode is None:
        return run()
    graph: fx.Graph = mode.tracer.graph
    last = next(iter(reversed(graph.nodes)), None)
    result = run()
    for node in reversed(graph.nodes):
        if node is last:
            break
        node.meta.setdefault(CAPTURED, name)
    return result
