"""Compile the search ahead of its first use: 50 s of processor time, once after an installation.

Otherwise the first planning that needs it compiles it and prints a line about it; that time is not counted.

numba keeps the result next to the sources, or in ``NUMBA_CACHE_DIR``. Run: ``python -m panpipe.core.search.compiling``.
"""

from collections.abc import Callable
from itertools import pairwise

from ..cluster.cluster import fully_connected
from ..costs.graph import OpEdge, OpGraph, OpNode
from ..numba_cache import compile_notice, is_compiled
from ..schedules.registry import resident_families
from .annealing.anneal import anneal
from .choose import search_plans
from .problem.workload import workload_of
from .search_options import SearchOptions


def compile_search() -> None:
    """Search a plan for a few operators, with a budget for all of the search's rounds: a large model's search uses
    functions compiled for the same types."""
    nodes = tuple(OpNode(f"operator{i}", i % 3 + 1.0, 1.0, 2.0, saved_bytes=1) for i in range(6))
    graph = OpGraph(nodes, tuple(OpEdge(a.name, b.name, 1) for a, b in pairwise(nodes)))
    cluster = fully_connected(2, 1000, 1e9, 1e-6)
    search_plans(workload_of(graph, cluster, 4), cluster, SearchOptions(families=resident_families(), budget=80_000))


def is_search_compiled() -> bool:
    """Whether the search is compiled on this machine."""
    return is_compiled(anneal)


def compile_ahead(report: Callable[[str], object]) -> bool:
    """Compile the search unless it is already compiled on this machine; return whether it had to be.

    Args:
        report: called with a message before compiling.
    """
    if is_search_compiled():
        return False
    with compile_notice(report):
        compile_search()
    return True


if __name__ == "__main__":
    compile_search()
