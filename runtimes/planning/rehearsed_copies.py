"""Rates of copies to the host and back from rehearsed steps, in which devices compute and both directions run."""

from collections.abc import Mapping, Sequence

import numpy
from attrs import evolve

from ...core.actions import Kind
from ...core.cluster.routing import Link
from ...core.plan.plan import Plan
from ...core.trace.trace import Trace

Rates = Mapping[tuple[int, Kind], float]
"""(Rank, OFFLOAD or RELOAD) → bytes per second."""


def copy_rates(traces: Sequence[Trace], quantile: float) -> dict[tuple[int, Kind], float]:
    """The rate of each device's copies in each direction: all bytes of a step ÷ the time in which they were copied.

    Args:
        traces: of rehearsed steps of one plan.
        quantile: of the time of a byte over steps, between 0 and 1.
    """
    found: dict[tuple[int, Kind], list[float]] = {}
    for trace in traces:
        size: dict[tuple[int, Kind], float] = {}
        seconds: dict[tuple[int, Kind], float] = {}
        for event in trace.events:
            if event.action.kind in (Kind.OFFLOAD, Kind.RELOAD):
                key = event.device, event.action.kind
                size[key] = size.get(key, 0.0) + event.bytes
                seconds[key] = seconds.get(key, 0.0) + event.end_s - event.start_s
        for key, copied in size.items():
            if copied and seconds[key] > 0:
                found.setdefault(key, []).append(seconds[key] / copied)
    return {key: 1 / float(numpy.quantile(each, quantile)) for key, each in found.items()}


def with_copy_rates(plan: Plan, rates: Rates) -> Plan:
    """The plan whose prediction's cluster has these rates.

    Only links between a device and its host change: on a longer path, others may share the link that limits the rate.
    """
    cluster, links = plan.predicted.cluster, dict[Link, Link]()
    for (rank, kind), rate in rates.items():
        path = cluster.host_path(plan.mesh.cluster_devices[rank])
        if len(path) == 1:
            ((link, outward),) = path
            known = links.get(link, link)
            from_a = outward is (kind is Kind.OFFLOAD)
            there, back = (rate, known.rate(False)) if from_a else (known.bytes_per_s, rate)
            links[link] = evolve(known, bytes_per_s=there, back_bytes_per_s=back)
    changed = evolve(cluster, links=tuple(links.get(link, link) for link in cluster.links))
    return evolve(plan, prediction=evolve(plan.predicted, cluster=changed))


def scaled(rates: Rates, ratio: float) -> dict[tuple[int, Kind], float]:
    """The rates of copies that take ``ratio`` times as long."""
    return {key: rate / ratio for key, rate in rates.items()}
