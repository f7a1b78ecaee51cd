"""The partition of a problem, or the reason why there is none."""

from collections.abc import Sequence

from ..cluster import Cluster
from ..errors import InfeasibleError
from .balanced import balanced
from .exact import least_bottleneck, least_excess
from .held import Held, held
from .problem import Cuts, PartitionProblem


def partition(problem: PartitionProblem) -> Cuts:
    """Cut the graph's order into stages.

    With one stage a device the cuts are optimal: the least bottleneck that memory allows, then the fewest bytes. With
    more chunks the stages start near equal and are then moved until no single cut improves the slowest device.

    Raises:
        InfeasibleError: no cuts that were found keep every device within its limit; the message names the device that
            binds, what it holds, and the smallest limit that would do for those cuts.
    """
    cuts = nearest_cuts(problem)
    check_memory(problem, cuts)
    return cuts


def nearest_cuts(problem: PartitionProblem) -> Cuts:
    """What :func:`partition` gives, but where memory does not suffice, the cuts that exceed it by little."""
    if problem.stages > problem.devices:
        return balanced(problem)
    return least_bottleneck(problem) or least_excess(problem)[0]


def check_memory(problem: PartitionProblem, cuts: Cuts) -> None:
    """Refuse cuts that take a device above its limit.

    Raises:
        InfeasibleError: see :func:`partition`.
    """
    refuse_above(problem.cluster, problem.limits, held(problem, cuts))


def refuse_above(cluster: Cluster, limits: Sequence[float], needs: Sequence[Held]) -> None:
    """Refuse devices that hold more than their limits.

    Raises:
        InfeasibleError: one line: the device that binds, what it holds by kind, and the smallest change that fits.
    """
    over = [need.bytes - limit for need, limit in zip(needs, limits, strict=True)]
    excess = max(over)
    if excess <= 0:
        return
    device = over.index(excess)
    need, limit = needs[device], limits[device]
    raise InfeasibleError(
        f"device {device} ('{cluster.devices[device].name}') needs {need.bytes:.0f} bytes and may hold {limit:.0f}: "
        f"{need.state_bytes:.0f} of parameters, gradients and optimizer state, {need.saved_bytes:.0f} of saved "
        f"tensors ({need.in_flight} in flight), {need.workspace_bytes:.0f} of workspace; "
        f"the smallest change that fits is {excess:.0f} bytes more a device, {limit + excess:.0f} in all"
    )
