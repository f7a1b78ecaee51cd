"""Sets the gradients of parameters to None that no microbatch of an update reached, as in one process.

    last backward ─▶ crossings of all regions, exchanged along the pipeline ─▶ parameters reached ─▶ the others: None
                                                                      (replicas: reached in any of them)

Only parameters that the loss depends on through regions alone can be missing; see
``core/capture/regions/gradient_paths``. A step without such parameters exchanges nothing. Replicas may run steps with
other Python values: what they exchange, and whether, depends on the example alone.
"""

from collections.abc import Collection, Sequence

import torch

from ...core.capture.export.operators import Operators
from ...core.capture.regions.gradient_paths import Crossing, GradientPaths
from ...core.errors import RequestError
from ..batch.batch_agreement import BatchAgreement
from ..engine.prepared import Prepared
from ..engine.workers import Workers
from ..launch.team import Team


class MissingGradients:
    """Finds the parameters without a gradient, and sets theirs to None, on each device of this process.

    Args:
        team: the devices.
        workers: those of this process.
        example: the operators of the example's step, equal in all processes.
    """

    def __init__(self, team: Team, workers: Workers, example: Operators) -> None:
        self._team, self._workers = team, workers
        self._common = sorted(set(example.step.parameters.values())) if example.paths.parameters else []
        self._reached: dict[int, set[str]] = {device: set() for device in team.local}

    def drop(
        self, device: int, prepared: Prepared, agreement: BatchAgreement, accumulating: bool, over_replicas: bool
    ) -> None:
        """Set gradients to None, after the last backward of a step. All devices call it together.

        Args:
            device: of this process.
            prepared: the step.
            agreement: of the batch, whose exchange has started. If ranks have different batches, nothing is set: the
                batch is refused.
            accumulating: whether the step added to gradients of earlier ones; otherwise they were cleared.
            over_replicas: whether the gradients are sums over replicas.

        Raises:
            RequestError: a parameter has no gradient here, and other replicas do not compare theirs.
        """
        reached = self._reached[device]
        if not accumulating:
            reached.clear()
        paths = [compiled.operators.paths for compiled in prepared.compiled]
        names = {name for each in paths for name in each.parameters}
        if names:  # steps without such parameters wait for nothing here
            agreement.arrive()
            if agreement.differ():
                names = set()  # all ranks of the replica know it, and exchange nothing
        crossed = self._crossed(device, prepared, paths) if names else [frozenset[Crossing]()] * len(paths)
        distinct = {(id(each), found): each for each, found in zip(paths, crossed, strict=True)}
        for (_, found), each in distinct.items():
            reached |= each.reached(found)
        missing = names - reached
        if over_replicas and self._team.replicas_of(device) is not None:
            if missing and not self._common:
                raise RequestError(
                    f"no microbatch takes the branch that uses parameter '{min(missing)}', which then has no gradient, "
                    "and replicas compare such parameters only if the example's step has that condition: give "
                    "panpipe.pipeline an example batch and Python values with which the step has it"
                )
            missing = self._missing_everywhere(device, reached | (_read(prepared) - names)) if self._common else set()
        self._workers.executor(device).drop_gradients(frozenset(missing))

    def _missing_everywhere(self, device: int, found: Collection[str]) -> set[str]:
        """The parameters of the example that are in ``found`` of no replica."""
        replicas, queue = self._team.replicas_of(device), self._workers.queues[device]
        assert replicas is not None
        flags = queue.upload(torch.tensor([float(name in found) for name in self._common]))
        replicas.all_reduce(flags).wait()
        return {name for name, flag in zip(self._common, queue.read(flags).tolist(), strict=True) if not flag}

    def _crossed(self, device: int, prepared: Prepared, paths: Sequence[GradientPaths]) -> list[frozenset[Crossing]]:
        """The crossings of each microbatch on all devices of the pipeline."""
        row: list[float] = []
        for m, each in enumerate(paths):
            here = {one for run in prepared.runs[device][m].values() for one in run.take_crossed(m)}
            row += [float((each.regions[k], o, i) in here) for k, o, i in each.crossings]
        backend, queue = self._team.backend(device), self._workers.queues[device]
        table = queue.upload(torch.tensor(row))
        backend.all_reduce(table).wait()
        flags = iter(queue.read(table).tolist())
        return [frozenset(crossing for crossing in each.crossings if next(flags)) for each in paths]


def _read(prepared: Prepared) -> set[str]:
    """Names of the parameters that a step reads."""
    distinct = {id(compiled): compiled.operators for compiled in prepared.compiled}.values()
    return {name for each in distinct for node, name in each.step.parameters.items() if each.nodes[node].users}
