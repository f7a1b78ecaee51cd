"""Reductions of a step, of both kinds: when they were, and what they moved."""

from collections.abc import Sequence

from ..core.actions import Kind
from .gradients import GradientReduction
from .tied import TiedReduction
from .times import FlowTimes, ReductionTimes
from .waiting import Delays, added, lost, scaled

Reduction = GradientReduction | TiedReduction


def reduction_times(
    gradients: Sequence[GradientReduction], tied: Sequence[TiedReduction]
) -> tuple[ReductionTimes, ...]:
    """Of every device and stage the reduction over replicas, and then, as one, those of its tied weights.

    Args:
        gradients: those of one position together, in the order issued.
        tied: of all replicas.
    """
    return (*_of_gradients(gradients), *_of_tied(tied))


def reduction_flows(gradients: Sequence[GradientReduction], tied: Sequence[TiedReduction]) -> tuple[FlowTimes, ...]:
    """What all of them sent."""
    flows = [flow for reduction in gradients for flow in reduction.collective.flows]
    flows += [flow for reduction in tied for flow in (*reduction.gather, *reduction.scatter)]
    return tuple(flow.times for flow in flows)


def _of_gradients(gradients: Sequence[GradientReduction]) -> list[ReductionTimes]:
    result = []
    delays: Delays = {}
    end_alone_s = 0.0
    before: GradientReduction | None = None
    for reduction in gradients:
        collective = reduction.collective
        if before is None or before.ranks != reduction.ranks:
            delays, end_alone_s = {}, 0.0
        before = reduction
        start_alone_s = max(*reduction.joined_s.values(), end_alone_s)
        own = added(lost(flow.times) for flow in collective.flows)
        delays = added((scaled(delays, collective.start_s - start_alone_s), own))
        end_alone_s = start_alone_s + collective.alone_s
        result += [
            ReductionTimes(
                rank,
                reduction.stage,
                reduction.joined_s[rank],
                collective.end_s,
                Kind.REDUCE_GRAD,
                collective.start_s,
                reduction.bytes,
                delays,
            )
            for rank in reduction.ranks
        ]
    return result


def _of_tied(tied: Sequence[TiedReduction]) -> list[ReductionTimes]:
    by_reader: dict[tuple[int, int], list[TiedReduction]] = {}
    for reduction in tied:
        for stage, (rank, _, _) in reduction.readers.items():
            by_reader.setdefault((rank, stage), []).append(reduction)
    result = []
    for (rank, stage), reductions in sorted(by_reader.items(), key=lambda item: item[0]):
        last = max(reductions, key=lambda reduction: reduction.end_s)
        result.append(
            ReductionTimes(
                rank,
                stage,
                last.joined_s[stage],
                last.end_s,
                Kind.REDUCE_TIED,
                last.start_s,
                sum(reduction.weight.bytes for reduction in reductions),
                last.contention,
            )
        )
    return result
