"""GIS, generalised interleaved schedules (PipeOffload, arXiv 2503.01328, section 4).

Interleaved 1F1B that begins its backwards earlier and splits them: with groups of g microbatches and v stages per
device, device d of p runs ``g(v − 1) + p − d`` forwards before its first backward, where interleaved 1F1B runs about
2(p − d) for the last p. Each backward is I and then W, so the gradient is sent while W runs; this compensates for the
fewer forwards ahead. A device holds saved tensors of at most as many stages as it has forwards ahead: p·v for groups
of p.

GIS-H uses the smallest groups that keep every device busy, ⌈p/2⌉: half of the memory, for an idle time of
``(p − g)(v − 1)`` passes.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from ..actions import Action, Kind
from ..errors import RequestError
from .construction.order import grouped, merge
from .problem import Schedule, ScheduleFamily, ScheduleProblem, looped_placement


def gis(problem: ScheduleProblem, *, group_size: int | None = None) -> Schedule:
    """GIS for any number of devices, chunks and microbatches.

    Args:
        group_size: microbatches that go through a device's stages together; by default the number of devices.

    Raises:
        RequestError: the group size is not between half the devices, rounded up, and their number.
    """
    devices = problem.devices
    size = devices if group_size is None else group_size
    if not -(-devices // 2) <= size <= devices:
        raise RequestError(
            f"group_size is {size}: groups of gis have from {-(-devices // 2)} to {devices} microbatches "
            f"for {devices} devices"
        )
    return _build(problem, size, f"gis(chunks={problem.chunks},group_size={size})")


def gis_h(problem: ScheduleProblem) -> Schedule:
    """GIS with the smallest groups, for any number of devices, chunks and microbatches."""
    return _build(problem, -(-problem.devices // 2), f"gis-h(chunks={problem.chunks})")


def _build(problem: ScheduleProblem, size: int, name: str) -> Schedule:
    devices, chunks, count = problem.devices, problem.chunks, problem.microbatches
    sizes = [size] * -(-count // size)
    rows = []
    for device in range(devices):
        stages = [device + devices * chunk for chunk in range(chunks)]
        forwards = grouped(stages, Kind.F, sizes)
        backwards = grouped(stages[::-1], Kind.B, sizes)
        rows.append(split(merge(forwards, backwards, size * (chunks - 1) + devices - device, count)))
    return Schedule(name, looped_placement(devices, chunks), count, tuple(rows))


def split(order: Iterable[Action]) -> tuple[Action, ...]:
    """The order with I and W in the place of every B."""
    return tuple(
        part
        for action in order
        for part in (
            (Action(action.stage, Kind.I, action.microbatch), Action(action.stage, Kind.W, action.microbatch))
            if action.kind is Kind.B
            else (action,)
        )
    )


def _candidates(problem: ScheduleProblem) -> Iterable[Mapping[str, Any]]:
    """Every group size above that of gis-h."""
    return tuple({"group_size": size} for size in range(problem.devices, -(-problem.devices // 2), -1))


GIS = ScheduleFamily(
    "gis", gis, "interleaved 1F1B with fewer forwards ahead and a split backward (PipeOffload)", split_backward=True,
    usual_chunks=2, candidates=_candidates,
)  # fmt: skip
GIS_H = ScheduleFamily(
    "gis-h", gis_h, "gis with groups of half the devices: about half of its memory (PipeOffload)", split_backward=True,
    usual_chunks=2,
)  # fmt: skip
