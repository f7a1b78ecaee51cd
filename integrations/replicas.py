"""The rows of a framework's batches that each replica of a pipeline trains on.

Frameworks give all ranks the same batches here. With several replicas each passes its own rows of them to the pipeline,
whose loss, gradients and update are those of all replicas together, and so of the whole batch:

batch of the framework, the same on all ranks ──▶ rows of replica 0, rows of replica 1, … ──▶ pipe.step
"""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..backends.data_collectives import all_gather_data
from ..core.capture.batch.batch_dims import AUTO, place_samples
from ..core.capture.regions.breaks import StepFunction
from ..core.capture.values.containers import flatten_batch
from ..core.errors import RequestError
from ..runtimes.batch.fingerprint import fingerprint
from ..runtimes.launch.launch import replica_here
from ..runtimes.microbatches import BatchCutter, split_batch
from ..runtimes.options import given_mesh, given_plan


class ReplicaRows:
    """Divides the batches of a framework over the replicas of a pipeline.

    Args:
        model, step, example: as ``panpipe.pipeline`` gets them, with a whole batch of the framework.
        options: the user's options of ``panpipe.pipeline``; its ``mesh`` or ``plan`` has the number of replicas.

    Raises:
        RequestError: the mesh does not fit the ranks, or the batch cannot be divided.
    """

    def __init__(self, model: nn.Module, step: StepFunction, example: Any, options: Mapping[str, Any]) -> None:
        self._own, self._count = replica_here(
            given_plan(options.get("plan", "auto"))[0], given_mesh(options.get("mesh"))
        )
        self._cutter: BatchCutter | None = None
        if self._count > 1:
            dims = place_samples(example, options.get("batch_dims", AUTO), self._count)
            shape = split_batch(example, self._count, dims)[0].shape
            self._cutter = BatchCutter(shape, self._count)

    def trained(self, batch: Any) -> Any:
        """The rows of this rank's replica; numbers of rows differ by at most one between replicas.

        Raises:
            RequestError: there are fewer rows than replicas, or ranks have different batches.
        """
        found = self._rows(batch, None)
        if found is None:
            raise RequestError(
                f"a batch has fewer rows than the mesh has replicas, {self._count}: drop the last batch of the loader "
                "(drop_last=True), or use fewer replicas"
            )
        return found

    def evaluated(self, batch: Any, step: StepFunction | None = None) -> Any:
        """The rows of this rank's replica, for ``evaluate``.

        If there are fewer rows than replicas, each replica evaluates all rows, which gives the same mean.

        Args:
            step: the function that reads it; None for the training step.
        """
        found = self._rows(batch, step)
        return batch if found is None else found

    def _rows(self, batch: Any, step: StepFunction | None) -> Any:
        """This replica's rows; None if there are fewer rows than replicas."""
        if self._cutter is None:
            return batch
        self._check_equal(batch)
        pieces = self._cutter.cut(batch, step)
        return pieces[self._own].batch if len(pieces) == self._count else None

    def _check_equal(self, batch: Any) -> None:
        """Refuse batches that differ between ranks: the pipeline compares those of one replica only."""
        if not dist.is_initialized():  # the example batch, which is also a training batch
            return
        leaves, _ = flatten_batch(batch)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        found = all_gather_data([[int(fingerprint([each])), *each.shape] for each in tensors])
        other = next((rank for rank, theirs in enumerate(found) if theirs != found[0]), None)
        if other is not None:
            raise RequestError(
                f"rank {other} has another batch than rank 0, and replicas divide the rows of one: let all ranks read "
                "the same batches, with samplers and random numbers of the same seed"
            )
