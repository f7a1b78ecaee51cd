"""What all integrations share: arguments that a framework has itself, its optimizer, and the rows of its batches.

A framework creates one optimizer with all parameters, and its schedulers write learning rates into its groups. A
pipeline has one optimizer for each stage. So the framework's optimizer keeps the groups and their options, and its
``step`` does nothing, because the pipeline's step has already updated the parameters.

framework ──▶ groups and options of ModelOptimizer ── before each step ──▶ the stages' optimizers

Frameworks give all ranks the same batches here. With several replicas each passes its own rows of them to the pipeline,
whose loss, gradients and update are those of all replicas together, and so of the whole batch:

batch of the framework, the same on all ranks ──▶ rows of replica 0, rows of replica 1, … ──▶ pipe.step
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from attrs import evolve
from torch import Tensor, nn
from torch.optim import Optimizer

from ..backends.data_collectives import all_gather_data
from ..core.capture.batch.batch_dims import AUTO, place_samples
from ..core.capture.regions.breaks import StepFunction
from ..core.capture.values.containers import flatten_batch
from ..core.errors import RequestError
from ..runtimes.batch.batch_agreement import fingerprint
from ..runtimes.launch.launch import replica_here
from ..runtimes.microbatches import BatchCutter, split_batch
from ..runtimes.options import given_mesh, given_plan
from ..runtimes.settings import Run, Update, values_of
from ..runtimes.update.optimizers import GivenOptimizer


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """A context for the imports of a framework.

    Args:
        extra: the extra of panpipe that installs it.

    Raises:
        ImportError: the framework, or a part of it, is not installed; the message names the extra.
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        raise ImportError(
            f"panpipe.integrations.{extra} needs the package '{missing.name}', which is not installed: "
            f"pip install 'panpipe[{extra}]'",
            name=missing.name,
        ) from missing


_GROUPS: dict[str, type] = {"update": Update, "run": Run}


def refuse_twice(place: str, framework: str, given: Mapping[str, Any], own: Mapping[str, str]) -> None:
    """Refuse arguments that follow from a framework's own.

    Args:
        place: what the user gave them to.
        own: the name of an argument, or of a field of a group, and what the framework has in its place.

    Raises:
        RequestError: the first one.
    """
    names = [*given]
    for name, group in _GROUPS.items():
        usual = values_of(group(), group)
        names += [each for each, value in values_of(given.get(name, group()), group).items() if value != usual[each]]
    twice = next((name for name in names if name in own), None)
    if twice is not None:
        raise RequestError(f"{place} has '{twice}', which {framework} has itself: use {own[twice]}")


def with_own(given: Mapping[str, Any], update: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, with fields of their groups that follow from a framework's own."""
    return {
        **given,
        "update": evolve(given.get("update") or Update(), **update),
        "run": evolve(given.get("run") or Run(), **run),
    }


class ModelOptimizer(Optimizer):
    """The optimizer that a framework sees: groups and options of a given one; its updates are the pipeline's.

    Args:
        given: over parameters of the model; it has not stepped yet, or it has the state of a checkpoint.

    Attributes:
        stages: creates the optimizers of the stages, as ``optimizer=`` of ``panpipe.pipeline``.

    Raises:
        RequestError: it takes a parameter that the model does not have.
    """

    def __init__(self, given: Optimizer, model: nn.Module) -> None:
        self._given = given
        super().__init__(given.param_groups, given.defaults)
        self._share()
        self.stages = GivenOptimizer(given, model)

    def _share(self) -> None:
        """Use the same groups and state objects as the given optimizer, because the user's schedulers write to them."""
        self.param_groups, self.state = self._given.param_groups, self._given.state

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the options of groups, and state for stages that are not built yet."""
        self._given.load_state_dict(state_dict)
        self._share()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update nothing: the pipeline's step does. A closure is called; it runs that step."""
        self._given._opt_called = True  # type: ignore[attr-defined] # the given optimizer's schedulers read it
        return None if closure is None else closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear nothing: the pipeline clears gradients after its update."""


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
