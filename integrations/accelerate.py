"""accelerate: an Accelerator for a pipeline, and a training loop as in accelerate's examples, around ``pipe.step``.

accelerator = pipeline_accelerator(cpu=True, gradient_accumulation_steps=2)
loader = accelerator.prepare(loader)                      # every rank reads the same batches
pipe, optimizer, scheduler = prepare(accelerator, model, step, example, optimizer, scheduler, microbatches=8)
for batch in loader:
    with accelerator.accumulate():
        loss = pipe.step(batch)                           # forward, backward, update
        optimizer.step(), scheduler.step()                # accelerate's counts; learning rates
accelerator.save_state(folder)                            # and load_state: weights, optimizer, counts
"""

import shutil
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..api import pipeline
from ..core.capture.regions.breaks import StepFunction
from ..core.errors import RequestError, warn_caller
from ..runtimes.pipeline import Pipeline
from .pipelines import ModelOptimizer, ReplicaRows, needs

with needs("accelerate"):
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DataLoaderConfiguration, DistributedType, find_batch_size

STATE = "pipeline"
"""The folder within accelerate's ``save_state`` that has the state of the pipeline."""


def pipeline_accelerator(**options: Any) -> Accelerator:
    """An Accelerator for the ranks of one pipeline: they read the same batches, and rank 0 writes.

    Args:
        options: the options of ``Accelerator``.

    Raises:
        RequestError: an option has no meaning for a pipeline.
    """
    if options.get("mixed_precision") not in (None, "no"):
        raise RequestError(
            f"mixed_precision is {options['mixed_precision']!r}: accelerate applies it to a model that it wraps; use "
            "torch.autocast in the step"
        )
    loaders = options.setdefault("dataloader_config", DataLoaderConfiguration())
    loaders.use_seedable_sampler = True  # all ranks draw the same order, whatever else they draw
    as_one_process(PartialState(cpu=options.get("cpu", False)))
    return Accelerator(**options)


def as_one_process(state: Any) -> None:
    """Make accelerate treat the ranks of a pipeline as one process: no sharding of data, no wrapping, no gathering.

    Args:
        state: accelerate's ``PartialState``, which has created the process group; it keeps the number of this rank, so
            that rank 0 alone logs and writes.
    """
    state.distributed_type, state.num_processes = DistributedType.NO, 1


class AcceleratedPipeline:
    """A pipeline whose updates follow an Accelerator's accumulation of gradients.

    Attributes:
        pipe: the pipeline.
    """

    def __init__(self, accelerator: Accelerator, pipe: Pipeline, rows: ReplicaRows) -> None:
        self.pipe = pipe
        self._accelerator, self._rows = accelerator, rows
        self._rows_of_update: int | None = None

    def step(self, batch: Any) -> Tensor:
        """Train on a batch, which is the same on all ranks.

        Within ``accelerator.accumulate()`` the last batch of an accumulation updates the parameters.

        Returns:
            The loss of the batch.
        """
        self._warn_of_other_size(find_batch_size(batch))
        return self.pipe.step(self._rows.trained(batch), update=self._accelerator.sync_gradients)

    def _warn_of_other_size(self, rows: int | None) -> None:
        """Warn about batches of several sizes in one update: accelerate itself gives each the same weight."""
        if self._rows_of_update is not None and rows != self._rows_of_update:
            warn_caller(
                f"an update has batches of {self._rows_of_update} and {rows} rows: the pipeline takes the mean over "
                "all rows, and accelerate alone the mean over batches; use drop_last=True for batches of one size",
            )
        self._rows_of_update = None if self._accelerator.sync_gradients else rows

    def evaluate(self, batch: Any, *, step: StepFunction | None = None) -> Tensor:
        """The loss of a batch, the same on all ranks, forward only (see ``Pipeline.evaluate``)."""
        return self.pipe.evaluate(self._rows.evaluated(batch, step), step=step)

    def __getattr__(self, name: str) -> Any:
        """All other attributes are those of the pipeline: ``forward``, ``save``, ``close`` …"""
        return getattr(self.pipe, name)

    def save_state(self, _models: Any, _weights: Any, folder: str) -> None:
        """Called by ``accelerator.save_state``."""
        state = Path(folder) / STATE
        if self._accelerator.is_main_process and state.exists():
            shutil.rmtree(state)
        self.pipe.checkpoint(state)

    def load_state(self, _models: Any, folder: str) -> None:
        """Called by ``accelerator.load_state``."""
        self.pipe.resume(Path(folder) / STATE)


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    step: StepFunction,
    example_batch: Any,
    optimizer: Optimizer,
    scheduler: Any = None,
    **options: Any,
) -> tuple[AcceleratedPipeline, Any, Any]:
    """Prepare a model as a pipeline, with its optimizer and scheduler, as ``accelerator.prepare`` does.

    Args:
        accelerator: from `pipeline_accelerator`.
        model, step, example_batch, options: of ``panpipe.pipeline``.
        optimizer: over the model's parameters.
        scheduler: of that optimizer; None for none.

    Returns:
        The pipeline; the optimizer, whose ``step`` only counts; and the scheduler.

    Raises:
        RequestError: the accelerator has several processes, or an argument is wrong.
    """
    if accelerator.num_processes > 1:
        raise RequestError(
            f"the accelerator has {accelerator.num_processes} processes with data of their own: create it with "
            "panpipe.integrations.accelerate.pipeline_accelerator()"
        )
    model_optimizer = ModelOptimizer(optimizer, model)
    rows = ReplicaRows(model, step, example_batch, options)
    pipe = pipeline(model, step, rows.trained(example_batch), optimizer=model_optimizer.stages, **options)
    prepared = AcceleratedPipeline(accelerator, pipe, rows)
    accelerator.register_save_state_pre_hook(prepared.save_state)
    accelerator.register_load_state_pre_hook(prepared.load_state)
    accelerated = accelerator.prepare(model_optimizer)
    return prepared, accelerated, None if scheduler is None else accelerator.prepare(scheduler)
