"""Weights between steps: averages, calls for every parameter, and parameters that replicas share."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from .core.errors import refuse_no_bool, refuse_other_kinds
from .runtimes.pipeline import Pipeline
from .runtimes.trainer import Trainer
from .runtimes.training.averages import AverageFunction, Visit, WeightAverage, visit_parameters

__all__ = ["ema", "on_parameters", "whole_parameters"]


def ema(
    pipe: Pipeline, decay: float = 0.999, *, buffers: bool = False, function: AverageFunction | None = None
) -> WeightAverage:
    """Keep an average of the weights, updated after every optimizer step. Every rank calls this.

    Each process averages what it holds. The average starts with the current values, and skipped updates do not
    change it. Later checkpoints contain it, and ``pipe.resume`` reads it if ``ema`` was called before. Its
    ``applied()`` is a context in which the model computes with it, for evaluation; its ``save(folder)`` writes it.

    Args:
        pipe: the pipeline.
        decay: the average becomes ``average.lerp_(parameter, 1 - decay)``.
        buffers: whether buffers are averaged, too; otherwise the model's buffers are used.
        function: ``function(average, parameter, updates)`` returns the new average: ``avg_fn`` of
            ``torch.optim.swa_utils.AveragedModel``, in place of ``decay``.

    Raises:
        RequestError: decay is not a number from 0 to 1, or function is not callable; or function is given and
            parameters are DTensors, of which each process has a part.

    Example:
        >>> average = panpipe.weights.ema(pipe, 0.999)  # doctest: +SKIP
        >>> with average.applied():  # doctest: +SKIP
        ...     loss = pipe.evaluate(batch)
    """
    refuse_no_bool(buffers=buffers)
    trainer = _with_values(pipe)
    if function is not None:
        trainer.team.tensors.refuse("ema(function=) of a pipeline")
    return trainer.averages.add(decay, buffers, function)


def on_parameters(pipe: Pipeline, function: Visit) -> dict[str, Any]:
    """Call a function with every parameter, in each process that holds it. Every rank calls this.

    It replaces a loop over ``model.parameters()`` between steps: clipping of weights, noise, statistics. The
    function may change parameters in place; their gradients are in ``grad``. Processes that hold a tied weight, and
    replicas, call it with the same value and the same random numbers, and it must make the same changes there.

    Args:
        pipe: the pipeline.
        function: ``function(name, parameter)``, called under ``no_grad``.

    Returns:
        Name → result, for the parameters that this process holds.
    """
    kind: Any = Callable  # for mypy it is no type
    refuse_other_kinds("function", function, kind, "a function of a parameter's name and the parameter")
    trainer = _with_values(pipe)
    trainer.team.tensors.refuse("on_parameters of a pipeline")
    trainer.state.visits += 1
    key = trainer.state.seed, trainer.state.steps, trainer.state.visits
    with trainer.stages.whole_parameters():
        return visit_parameters(trainer.whole_model, trainer.stages.states, function, key)


def whole_parameters(pipe: Pipeline) -> AbstractContextManager[None]:
    """A context in which each replica holds its stages' parameters whole, where replicas share them
    (``shard="parameters"``). Every rank enters it.

    Between steps each replica has only a part of them, and using their values is refused. What is written to them
    within, the same in all replicas, is kept; after an error nothing is. Training is refused within. Without such
    stages it does nothing.

    Example:
        >>> with panpipe.weights.whole_parameters(pipe):  # doctest: +SKIP
        ...     norm = model.head.weight.norm()
    """
    return _with_values(pipe).stages.whole_parameters()


def _with_values(pipe: Pipeline) -> Trainer:
    """The trainer of a pipeline, whose parameters have values."""
    refuse_other_kinds("pipe", pipe, Pipeline, "what panpipe.pipeline(...) returned")
    trainer = pipe._session.trainer
    trainer.refuse_closed()
    trainer.stages.ensure_values()
    return trainer
