"""Models by name, for the commands with ``--model``; the only planning code that imports torch."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from inspect import Parameter, signature
from traceback import extract_tb
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from ..core.analytic.model import with_state
from ..core.analytic.optimizers import Optimizer
from ..core.analytic.repeated import Repeated, shorten
from ..core.capture.batch.batch_dims import AUTO
from ..core.capture.batch.find_batch_dims import find_batch_dims
from ..core.capture.export.operators import Operators, operators_of, tensor_bytes
from ..core.capture.export.step import capture_step
from ..core.capture.values.containers import flatten_batch
from ..core.capture.values.sparse_tensors import distributed_tensors
from ..core.costs.graph import OpGraph
from ..core.errors import PanpipeError, RequestError, in_a_line
from ..core.trace.throughput import StepTotals
from ..core.wording import counted
from ..runtimes.devices.heap import empty_weights
from ..runtimes.microbatches import split_batch
from .bundled_models import check_model_name, is_bundled, make
from .output import note

NAMED = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
"""Kinds of parameters that are passed one by one."""

Made = tuple[nn.Module, Callable[[nn.Module, Any], Any], Any, dict[str, Any]]
"""Model, step, example batch, and options by name."""

Factory = Callable[[], Any]

Step = Callable[[nn.Module, Any], Any]

OPTIONS = ("batch_dims",)
"""The options that a factory may return; as the arguments of ``panpipe.pipeline``."""

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
          "fp8": torch.bfloat16}  # fmt: skip
"""The dtype of a model's parameters and batch, by ``--dtype``."""


def load_factory(name: str) -> Factory:
    """Import the function that ``module:factory`` names; modules are also found in the current directory.

    Raises:
        RequestError: the name has another form, the module cannot be imported, or it has no such function.
    """
    check_model_name(name, bundled=False)
    module, _, attribute = name.partition(":")
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        with _in_one_line(f"importing '{module}' for '{name}'"):
            factory = getattr(import_module(module), attribute, None)
    except ImportError as error:
        raise RequestError(
            f"cannot import '{module}' for '{name}': {error}; run in the module's folder, or install it"
        ) from None
    finally:
        sys.path.remove(here)  # not the first entry: the module may have inserted others before it
    if not callable(factory):
        raise RequestError(f"module '{module}' has no function '{attribute}': name one that it has")
    try:
        needed = [p.name for p in signature(factory).parameters.values() if p.default is p.empty and p.kind in NAMED]
    except ValueError:  # a callable without a signature
        needed = []
    if needed:
        raise RequestError(
            f"'{name}' needs {' and '.join(needed)}: name a function without required arguments that returns "
            "(model, step, example_batch)"
        )
    return factory  # type: ignore[no-any-return]


def load_model(name: str, *, empty: bool = False) -> Made:
    """Model, step, example batch and options from ``module:factory``; with ``empty`` parameters are on the meta device,
    unless a constructor needs their values.

    Raises:
        RequestError: the factory cannot be found, or returns something else.
    """
    factory = load_factory(name)
    with _in_one_line(f"'{name}'"):
        if empty:
            with suppress(RuntimeError, NotImplementedError), empty_weights():  # raised if a value is needed
                return _checked(name, factory())
        return _checked(name, factory())


@contextmanager
def _in_one_line(what: str) -> Iterator[None]:
    """Replace an exception of the user's code, except ImportError, by one line with the place in that code.

    Raises:
        RequestError: the code raises an exception, or exits.
    """
    try:
        yield
    except (ImportError, PanpipeError):
        raise
    except (Exception, SystemExit) as error:
        frames = [frame for frame in extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
        where = f"{frames[-1].filename}, line {frames[-1].lineno}"
        if isinstance(error, SyntaxError):
            where = f"{error.filename}, line {error.lineno}"
        raise RequestError(
            f"{what} raised {in_a_line(error)} in {where}: call the function in Python for the whole traceback"
        ) from error


def _checked(name: str, made: Any) -> Made:
    right = isinstance(made, tuple) and len(made) in (3, 4) and isinstance(made[0], nn.Module) and callable(made[1])
    if not right:
        items = f" of {', '.join(type(each).__name__ for each in made)}" if isinstance(made, tuple) else ""
        raise RequestError(
            f"'{name}' returned an object of type {type(made).__name__}{items}: return (model, step, example_batch), "
            f"optionally with a dict of options as fourth item: {', '.join(OPTIONS)}"
        )
    options = made[3] if len(made) == 4 else {}
    unknown = [option for option in options if option not in OPTIONS] if isinstance(options, dict) else [options]
    if unknown:
        raise RequestError(
            f"'{name}' returned the option {unknown[0]!r}: return as fourth item a dict with {', '.join(OPTIONS)}"
        )
    return made[0], made[1], made[2], options


@frozen
class PlannedModel:
    """A model to plan for, captured with one microbatch.

    Args:
        model: the module; on the meta device, if it could be constructed there.
        samples, tokens: size of a whole batch; tokens are known only for bundled language models.
        captured_samples: those of the captured microbatch; other microbatches may have fewer.
        sizes: bytes of every parameter.
        repeated: layers of which the captured model has only some; None if it has all.
    """

    model: nn.Module
    leaves: Sequence[Any]
    operators: Operators
    samples: int
    tokens: int | None
    captured_samples: int
    sizes: dict[str, int]
    repeated: Repeated | None = None

    def measured(self, optimizer: Optimizer | None = None) -> OpGraph:
        """The operators with times measured on this host, and with the size of an optimizer's state; Adam's if None."""
        from ..runtimes.profile.operator_profile import profile_operators  # other models need no runtime

        parameters, buffers = dict(self.model.named_parameters()), dict(self.model.named_buffers())
        graph = profile_operators(self.operators, parameters, buffers, self.leaves)
        return graph if optimizer is None else with_state(graph, self.operators, optimizer)

    def work(self, flops: int | None = None) -> StepTotals:
        """Samples and tokens of a step, and its FLOPs if those of the captured microbatch are given."""
        total = None if flops is None else flops * self.samples // self.captured_samples
        return StepTotals(self.samples, self.tokens, total)


def planned_model(
    name: str,
    microbatches: int,
    *,
    batch: int | None = None,
    sequence: int | None = None,
    dtype: str | None = None,
    empty: bool = False,
    device: torch.device | None = None,
    tensor: int = 1,
    by_tokens: bool = False,
    repeat: bool = False,
    experts: int = 1,
) -> PlannedModel:
    """Construct and capture a model.

    Args:
        batch, sequence: samples, and tokens of a sample, of a bundled model; if None one sample for each microbatch,
            and the published length.
        dtype: one of `DTYPES`, for parameters and activations; the model's own if None.
        empty: whether parameters need no values: those of a factory's model are created on meta.
        device: a GPU to which model and batch are moved; they are not moved if None.
        tensor: number of tensor ranks that share the model; the result is the part of one rank. A factory's model is
            split by its own ``parallelize_module``.
        by_tokens: whether they share the tokens between layers, too (sequence parallelism); for bundled models.
        experts: number of expert ranks of a bundled mixture model, each with ``batch`` samples.
        repeat: whether a bundled model is captured with few of its layers if these are equal (`PlannedModel.repeated`).

    Raises:
        RequestError: the factory cannot be found or returns something else, or the step cannot be captured.
    """
    bundled = is_bundled(name)
    if bundled:
        given = microbatches if batch is None else batch
        made: Made = (*make(name, given, sequence, tensor, by_tokens=by_tokens, experts=experts), {"batch_dims": 0})
    elif batch is not None or sequence is not None:
        raise RequestError(
            f"--batch and --sequence are for bundled models, and '{name}' returns its own example batch: leave them out"
        )
    else:
        made = load_model(name, empty=empty)
    model, step, example, options = made if dtype is None else _cast(made, DTYPES[dtype])
    if device is not None and device.type != "cpu":
        on_meta = any(parameter.is_meta for parameter in model.parameters())
        model = model.to_empty(device=device) if on_meta else model.to(device)
        example = _map_tensors(example, lambda tensor: tensor.to(device))
    if tensor > 1 and not bundled:
        model, step = _program_of_rank(name, model, step, tensor)
    elif distributed_tensors(model):
        count = next(iter(distributed_tensors(model).values())).device_mesh.size()
        raise RequestError(f"'{name}' returns a model with DTensor parameters over {count} ranks: give --tp {count}")
    sizes = {key: tensor_bytes(parameter) for key, parameter in model.named_parameters()}
    repeated = shorten(model) if repeat and bundled else None
    dims = find_batch_dims(model, step, example, given=options.get("batch_dims", AUTO), microbatches=microbatches)
    pieces = split_batch(example, microbatches, dims)
    note(f"capturing the model for {counted(pieces[0].samples, 'sample')} a microbatch, over fake tensors")
    captured = capture_step(model, step, pieces[0].batch, device=device or "cpu")
    samples = sum(piece.samples for piece in pieces)
    tokens = example["tokens"].numel() if bundled and "tokens" in example else None
    operators = operators_of(captured)
    return PlannedModel(model, pieces[0].leaves, operators, samples, tokens, pieces[0].samples, sizes, repeated)


def _program_of_rank(name: str, model: nn.Module, step: Step, tensor: int) -> tuple[nn.Module, Step]:
    """The part of one tensor rank of a factory's model."""
    if not distributed_tensors(model):
        raise RequestError(
            f"--tp {tensor} splits bundled language models, and '{name}' returns a model without DTensor parameters: "
            "apply parallelize_module to it (torch's fake process group is enough), or leave --tp out"
        )
    from ..runtimes.tensor_parallel.recording import program_of_rank

    return program_of_rank(model, step, tensor)


def _map_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The batch with ``change`` applied to each of its tensors."""
    leaves, nesting = flatten_batch(batch)
    return nesting.batch([change(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves])


def _cast(made: Made, dtype: torch.dtype) -> Made:
    """The model and the batch in another dtype, by ``model.to(dtype)``."""
    model, step, batch, options = made
    return model.to(dtype), step, _map_tensors(batch, lambda t: t.to(dtype) if t.is_floating_point() else t), options
