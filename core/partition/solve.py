"""The partition of a problem, or the reason why there is none."""

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
    needs = held(problem, cuts)
    over = [need.bytes - limit for need, limit in zip(needs, problem.limits, strict=True)]
    device = over.index(max(over))
    if over[device] > 0:
        raise InfeasibleError(infeasible_message(problem, device, needs[device], max(over)))


def infeasible_message(problem: PartitionProblem, device: int, need: Held, excess: float) -> str:
    """One line: the device that binds, what it holds by kind, and the smallest change that fits."""
    limit = problem.limits[device]
    name = problem.cluster.devices[device].name
    return (
        f"device {device} ('{name}') needs {need.bytes:.0f} bytes and may hold {limit:.0f}: "
        f"{need.state_bytes:.0f} of parameters, gradients and optimizer state, {need.saved_bytes:.0f} of saved "
        f"tensors ({need.in_flight} in flight), {need.workspace_bytes:.0f} of workspace; "
        f"the smallest change that fits is {excess:.0f} bytes more a device, {limit + excess:.0f} in all"
    )
