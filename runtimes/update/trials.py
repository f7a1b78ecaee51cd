"""Trials of the user's optimizer on small random parameters, before training. Three properties are tested:

- Separable: its update of a parameter is independent of others, so that each stage may have its own optimizer. It steps
  the parameters of all stages together, and those of each stage alone.
- Elementwise: its update of an element is independent of others, so that each replica may update a part of a parameter.
  It steps whole parameters, and slices of them as replicas would hold them. Adam, SGD, RMSprop and the like are
  elementwise. Not elementwise are updates with a factor of norms of the parameter (LAMB, LARS), with statistics of rows
  and columns (Adafactor, Shampoo, SOAP), with an orthogonal matrix (Muon), or with noise that is drawn.
- The same on every rank: its class, the options of each parameter, and what its scheduler has in its state.

An optimizer that cannot be tried on whole parameters is accepted: the real one will raise the error.
"""

import zlib
from collections.abc import Iterable, Mapping, Sequence

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.optim import Optimizer

from ...backends.contract import Backend
from ...core.errors import RequestError, in_a_line
from .buckets import Sharing
from .optimizers import OptimizerFactory, SchedulerFactory, options_of, text_of
from .shards import Shards

_STEPS = 3
"""Steps of a trial: the state of an optimizer changes its later updates."""
_OF_STAGE, _SIZE, _SAME_OF_ALL = 8, 3, 1e-6
"""Parameters of each stage that are tried together with those of others, their largest size of a dimension, and the
largest relative difference in norm of two updates, in float64, that counts as rounding: a factor that depends on other
parameters differs by more."""
_FEW, _SMALL, _LARGEST, _LARGE, _SAME_IN_PARTS = 64, 5, 2, 512, 1e-9
"""Parameters of a stage that are tried in parts and small, their largest size of a dimension; the number of the largest
parameters of all stages that are tried in parts and large, because some optimizers treat large matrices differently,
and their largest size; the difference that counts as rounding."""
_REPLICAS = 3
_REFUSED = "sharding needs an elementwise optimizer, such as torch.optim.AdamW or SGD; use one, or give shard='none'"


@frozen
class _Trial:
    """An optimizer that was tried.

    Args:
        options: name of a parameter → the options of its group.
        changes: name of a parameter → its update, in one dimension.
    """

    kind: str
    options: dict[str, dict[str, str]]
    changes: dict[str, Tensor]

    def refuse_other(self, parts: Sequence["_Trial | None"], most: float, reason: str) -> None:
        """Refuse updates that differ from those of trials that each stepped a part of the parameters.

        Args:
            most: the relative difference that counts as rounding.
            reason: for the message; has a place for the name of the parameter.
        """
        for name, change in self.changes.items():
            found = [part.changes[name] for part in parts if part is not None and name in part.changes]
            both = torch.cat(found) if found else change
            if both.shape != change.shape or (both - change).norm() > most * change.norm():
                raise RequestError(f"{self.kind} {reason.format(name)}")


def check_separable(make: OptimizerFactory, stages: Sequence[Mapping[str, nn.Parameter]]) -> None:
    """Refuse an optimizer whose update of a parameter depends on other parameters: each stage has its own optimizer.

    Args:
        stages: the trained parameters of each stage, by name; on meta or not.

    Raises:
        RequestError: the updates or options differ.
    """
    tried = [_small({name: stage[name] for name in _spread(stage, _OF_STAGE)}, _SIZE) for stage in stages if stage]
    if len(tried) < 2:
        return
    try:
        together = _try(make, {name: p for stage in tried for name, p in stage.items()})
        alone = [_try(make, stage) for stage in tried]
    except Exception:
        return
    if together is None:
        return
    for name, options in (pair for found in alone if found is not None for pair in found.options.items()):
        wanted = together.options[name]
        if options != wanted:
            key = next(key for key in {**options, **wanted} if options.get(key) != wanted.get(key))
            raise RequestError(
                f"optimizer(...) gives '{name}' other options with the parameters of all stages than with those of "
                f"its stage alone ({key} {wanted.get(key)} and {options.get(key)}): it is called for each stage; "
                "choose groups and options by the names of parameters, not by their number or order"
            )
    for found in alone:  # a tied weight is in several
        together.refuse_other(
            [found],
            _SAME_OF_ALL,
            "changes '{}' differently with the parameters of all stages than with those of its stage alone: a pipeline "
            "has an optimizer for each stage; use one that updates each parameter independently, such as "
            "torch.optim.AdamW, or a plan of one stage",
        )


def check_elementwise(make: OptimizerFactory, stages: Sequence[Mapping[str, nn.Parameter]]) -> None:
    """Refuse an optimizer that updates slices of a parameter differently than the whole parameter.

    Args:
        stages: the trained parameters of each stage, by name; on meta or not.

    Raises:
        RequestError: the updates differ, or slices cannot be stepped.
    """
    every = {name: p for stage in stages for name, p in stage.items()}
    large = sorted(every, key=lambda name: -every[name].numel())[:_LARGEST]
    tried = [_small({name: stage[name] for name in _spread(stage, _FEW)}, _SMALL) for stage in stages if stage]
    tried += [_small({name: every[name]}, _LARGE) for name in large if max(every[name].shape, default=0) > _SMALL]
    for parameters in tried:
        try:
            whole = _try(make, parameters)
        except Exception:
            return
        if whole is None:
            return
        try:
            parts = [_try(make, parameters, Sharing(_no_transport, number, _REPLICAS)) for number in range(_REPLICAS)]
        except Exception as failure:
            raise RequestError(
                f"{whole.kind} cannot step a part of a parameter ({in_a_line(failure)}): {_REFUSED}"
            ) from failure
        whole.refuse_other(
            parts,
            _SAME_IN_PARTS,
            "updates '{}' differently if each replica steps a part of it: its update of an element depends on others; "
            + _REFUSED,
        )


def _try(make: OptimizerFactory, shapes: Mapping[str, Tensor], sharing: Sharing | None = None) -> _Trial | None:
    """Step an optimizer on random tensors; None if the user's function makes none.

    The numbers of a parameter depend on its name and shape alone, so that trials with others draw the same.

    Args:
        sharing: whose slices are stepped; None for whole parameters.
    """
    generators = {name: torch.Generator().manual_seed(zlib.crc32(name.encode())) for name in shapes}

    def draw(name: str) -> Tensor:
        return torch.randn(shapes[name].shape, dtype=shapes[name].dtype, generator=generators[name])

    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        parameters = {name: nn.Parameter(draw(name)) for name in shapes}
        made = make(list(parameters.items()))
        if made is None:
            return None
        kind, options = type(made).__name__, _options_by_name(made, parameters)
        shards = None if sharing is None else Shards(parameters, sharing)
        if shards is not None:
            shards.narrow_optimizer(made)
        before = {name: p.detach().flatten().clone() for name, p in parameters.items()}
        for _ in range(_STEPS):
            for name, parameter in parameters.items():
                gradient = draw(name)
                if shards is None:
                    parameter.grad = gradient
                elif name in shards.parts:
                    part = shards.parts[name]
                    part.value.grad = part.slice_of(gradient.flatten()).view(part.value.shape)
            made.step()
        changes = {name: p.detach().flatten() - before[name] for name, p in parameters.items()}
        if shards is not None:
            changes = {name: part.slice_of(changes[name]) for name, part in shards.parts.items()}
        return _Trial(kind, options, changes)


def _options_by_name(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, dict[str, str]]:
    """The options of the group of each parameter."""
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    return {
        name_of[id(p)]: options
        for group, options in zip(optimizer.param_groups, options_of(optimizer), strict=True)
        for p in group["params"]
        if id(p) in name_of
    }


def _no_transport() -> Backend:
    """The transport of a trial, which moves nothing: only reductions and gathers ask for it."""
    raise AssertionError("a trial of an optimizer moves no tensors")


def _small(parameters: Mapping[str, nn.Parameter], largest: int) -> dict[str, Tensor]:
    """Small tensors on meta of the same numbers of dimensions, in float64 or complex128."""
    return {
        name: torch.empty(
            [min(size, largest) for size in p.shape],
            dtype=torch.complex128 if p.dtype.is_complex else torch.float64,
            device="meta",
        )
        for name, p in parameters.items()
    }


def _spread(names: Mapping[str, object], most: int) -> list[str]:
    """At most this many of some names, at equal distances; all of them if they are no more."""
    return list(names)[:: max(-(-len(names) // most), 1)]


def describe_update(
    optimizer: OptimizerFactory | None,
    scheduler: SchedulerFactory | None,
    parameters: Iterable[tuple[str, nn.Parameter]],
) -> dict[str, str]:
    """The optimizer and the scheduler of a model's trained parameters as strings, by which ranks find that theirs
    differ (`training/agreement`).

    The user's functions create them for small tensors with the names, dtypes and numbers of dimensions of the
    parameters, which may be on meta.

    Returns:
        What each option is of → its value. Nothing more than ``"an optimizer"`` if one of the functions fails: the
        pipeline's own optimizers raise the error.

    Raises:
        RequestError: the function of the optimizer returns nothing for all of them.
    """
    found = {"an optimizer": str(optimizer is not None), "a scheduler": str(scheduler is not None)}
    small = {
        name: nn.Parameter(torch.zeros([min(size, 2) for size in p.shape], dtype=p.dtype))
        for name, p in parameters
        if p.requires_grad
    }
    if optimizer is None or not small:
        return found
    try:
        with torch.random.fork_rng([]):
            made = optimizer(list(small.items()))
            planned = None if scheduler is None or made is None else scheduler(made)
            if made is not None:
                found["optimizer"] = type(made).__name__
                for name, options in _options_by_name(made, small).items():
                    found |= {f"{key} of '{name}'": text for key, text in options.items()}
            if planned is not None:
                found["scheduler"] = type(planned).__name__
                found |= {f"scheduler's {key}": text_of(value) for key, value in planned.state_dict().items()}
    except RequestError:
        raise
    except Exception:
        return {"an optimizer": "True"}
    if made is None:
        raise RequestError(
            f"optimizer returned None for all {len(small)} trained parameters of the model: return the optimizer, as "
            "in lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)"
        )
    return found
