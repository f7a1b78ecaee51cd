"""A policy of a test, all of it in this file: messages between stages in 8 bits.

They have a quarter of the bytes. PACK compresses each on a queue of its own after F, into memory that B or I frees.
"""

from attrs import evolve
from panpipe.core.actions import Kind, declare_kind
from panpipe.core.costs.graph import OpGraph
from panpipe.core.plan.memory import Change, Moment, Size, Use
from panpipe.core.plan.plan import Plan

from ..own_queue import own_queue

PACK, QUEUE, SECONDS = declare_kind("PACK"), "packing", 0.25


def packed(graph: OpGraph) -> OpGraph:
    """The graph with messages of 8 bits for those of 32."""
    return evolve(graph, edges=tuple(evolve(edge, bytes=-(-edge.bytes // 4)) for edge in graph.edges))


def sending(plan: Plan) -> set[int]:
    """The stages that send to another device."""
    where = plan.placement
    return {edge.src for edge in plan.edges if where[edge.src] != where[edge.dst]}


KIND = own_queue(
    PACK, QUEUE, stages=sending, after=Kind.F, fence=(Kind.B, Kind.I), seconds=lambda _: SECONDS,
    changes=(Change(Moment.START, Use.SAVED, Size.WORKSPACE, 1), Change(Moment.END, Use.SAVED, Size.WORKSPACE, -1)),
)  # fmt: skip
