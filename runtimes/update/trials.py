"""Trials of the user's optimizer on small random parameters, before training. Two properties are tested:

- Separable: its update of a parameter is independent of others, so that each stage may have its own optimizer. It steps
  the parameters of all stages together, and those of each stage alone.
- Elementwise: its update of an element is independent of others, so that each replica may update a part of a parameter.
  It steps whole parameters, and slices of them as replicas would hold them. Adam, SGD, RMSprop and the like are
  elementwise. Not elementwise are updates with a factor of norms of the parameter (LAMB, LARS), with statistics of rows
  and columns (Adafactor, Shampoo, SOAP), with an orthogonal matrix (Muon), or with noise that is drawn.

An optimizer that cannot be tried on whole parameters is accepted: the real one will raise the error.
"""

import zlib
from collections.abc import Mapping, Sequence

import torch
from attrs import frozen
from torch import Tensor, nn

from ...backends.contract import Backend
from ...core.errors import RequestError, in_a_line
from .buckets import Sharing
from .optimizers import OptimizerFactory, options_of
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
        kind: its name.
        options: name of a parameter → the options of its group.
        changes: name of a parameter → its update, in one dimension.
    """

    kind: str
    options: dict[str, dict[str, str]]
    changes: dict[str, Tensor]


def check_separable(make: OptimizerFactory, stages: Sequence[Mapping[str, nn.Parameter]]) -> None:
    """Refuse an optimizer whose update of a parameter depends on other parameters: each stage has its own optimizer.

    Of torch's optimizers, which update each parameter independently or need a closure, the options of each parameter
    are compared, unless they have hooks.

    Args:
        stages: the trained parameters of each stage, by name; on meta or not.

    Raises:
        RequestError: the updates or options differ.
    """
    tried = [_small({name: stage[name] for name in _spread(stage, _OF_STAGE)}, _SIZE) for stage in stages if stage]
    if len(tried) < 2:
        return
    try:
        together = _try(make, {name: p for stage in tried for name, p in stage.items()}, options_of_torch=True)
        alone = [_try(make, stage, options_of_torch=True) for stage in tried]
    except Exception:
        return
    for found in alone if together is not None else ():
        assert together is not None
        for name, options in found.options.items() if found is not None else ():
            if options != together.options[name]:
                raise RequestError(
                    f"optimizer(...) gives '{name}' other options with the parameters of all stages than with those of "
                    f"its stage alone ({_other_option(together.options[name], options)}): it is called for each stage; "
                    "choose groups and options by the names of parameters, not by their number or order"
                )
        for name, change in found.changes.items() if found is not None else ():
            if _differ(change, together.changes[name], _SAME_OF_ALL):
                raise RequestError(
                    f"{together.kind} changes '{name}' differently with the parameters of all stages than with "
                    "those of its stage alone: a pipeline has an optimizer for each stage; use one that updates each "
                    "parameter independently, such as torch.optim.AdamW, or a plan of one stage"
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
        _check_parts(make, parameters)


def _check_parts(make: OptimizerFactory, parameters: Mapping[str, Tensor]) -> None:
    try:
        whole = _try(make, parameters)
    except Exception:
        return
    if whole is None:
        return
    parts: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for replica in range(_REPLICAS):
        try:
            found = _try(make, parameters, Sharing(_no_transport, replica, _REPLICAS))
        except Exception as failure:
            raise RequestError(
                f"{whole.kind} cannot step a part of a parameter ({in_a_line(failure)}): {_REFUSED}"
            ) from failure
        for name, change in found.changes.items() if found is not None else ():
            parts[name].append(change)
    for name, change in whole.changes.items():
        if parts[name] and _differ(torch.cat(parts[name]), change, _SAME_IN_PARTS):
            raise RequestError(
                f"{whole.kind} updates '{name}' differently if each replica steps a part of it: its update of an "
                f"element depends on others; {_REFUSED}"
            )


def _try(
    make: OptimizerFactory,
    shapes: Mapping[str, Tensor],
    sharing: Sharing | None = None,
    options_of_torch: bool = False,
) -> _Trial | None:
    """Step an optimizer on random tensors; None if the user's function makes none.

    The numbers of a parameter depend on its name and shape alone, so that trials with others draw the same.

    Args:
        shapes: by name, on meta.
        sharing: whose slices are stepped; None for whole parameters.
        options_of_torch: whether an optimizer of torch without hooks is not stepped.
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
        kind, name_of = type(made).__name__, {id(parameter): name for name, parameter in parameters.items()}
        options = {
            name_of[id(p)]: own for group, own in zip(made.param_groups, options_of(made), strict=True)
            for p in group["params"] if id(p) in name_of
        }  # fmt: skip
        hooks = made._optimizer_step_pre_hooks or made._optimizer_step_post_hooks
        if options_of_torch and type(made).__module__.startswith("torch.optim") and not hooks:
            return _Trial(kind, options, {})
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
                    part.value.grad = gradient.flatten()[part.start : part.stop].view(part.value.shape)
            made.step()
        changes = {name: p.detach().flatten() - before[name] for name, p in parameters.items()}
        if shards is not None:
            changes = {name: changes[name][part.start : part.stop] for name, part in shards.parts.items()}
        return _Trial(kind, options, changes)


def _no_transport() -> Backend:
    """The transport of a trial, which moves nothing: only reductions and gathers ask for it."""
    raise AssertionError("a trial of an optimizer moves no tensors")


def _differ(one: Tensor, other: Tensor, most: float) -> bool:
    return one.shape != other.shape or bool((one - other).norm() > most * other.norm())


def _other_option(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    key = next(key for key in {**one, **other} if one.get(key) != other.get(key))
    return f"{key} {one.get(key)} and {other.get(key)}"


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
