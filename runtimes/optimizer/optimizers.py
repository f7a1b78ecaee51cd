"""Optimizers and schedulers of stages, created by the user's functions.

A pipeline has an optimizer for each stage, created with the stage's parameters alone. Together they equal one optimizer
of all parameters, if it updates each parameter independently. Groups are formed by name and are the same in every
stage; a group may be empty in a stage.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ...core.errors import PanpipeError, RequestError, in_a_line

OptimizerFactory = Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer | None]
"""Creates an optimizer from (name, parameter) pairs: ``torch.optim.AdamW``, or a function that forms groups by name."""

SchedulerFactory = Callable[[Optimizer], LRScheduler]
"""Creates the scheduler of an optimizer: ``lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 1000)``."""

MEMBERS = ("params", "param_names")
"""The keys of a parameter group that are not options."""


def state_share(optimizer: OptimizerFactory | None) -> float:
    """Bytes of optimizer state for each byte of a parameter, measured with a small parameter.

    Args:
        optimizer: creates one; if it fails for the small parameter, the result is Adam's share, 2.
    """
    if optimizer is None:
        return 0.0
    probe = nn.Parameter(torch.zeros(64, 64))
    try:
        held = [value for value in blank_state(optimizer, "probe", probe).values() if isinstance(value, Tensor)]
    except Exception:
        return 2.0
    # Step counters do not grow with the parameter.
    return sum(value.nbytes for value in held if value.numel() >= 64) / probe.nbytes


def blank_state(make: OptimizerFactory, name: str, parameter: nn.Parameter) -> dict[str, Any]:
    """The state of a parameter after a step with a gradient of zeros.

    Args:
        make: creates the optimizer; it is called with a copy of the parameter.
        name, parameter: the parameter.
    """
    twin = nn.Parameter(torch.zeros_like(parameter))
    made = make([(name, twin)])
    if made is None:
        return {}
    twin.grad = torch.zeros_like(twin)
    made.step()
    return dict(made.state.get(twin, {}))


def stage_optimizer(make: OptimizerFactory, named: Sequence[tuple[str, nn.Parameter]]) -> Optimizer | None:
    """A stage's optimizer.

    Args:
        make: the user's.
        named: the stage's trained parameters, at least one.

    Returns:
        None if the user's function takes none of them.

    Raises:
        RequestError: it fails, or returns an optimizer that a stage cannot use.
    """
    where = f"the stage of '{named[0][0]}'"
    try:
        made = make(list(named))
    except PanpipeError:
        raise
    except Exception as failure:
        raise RequestError(
            f"optimizer(...) fails for {where}: {in_a_line(failure)}: it is called for each stage with the (name, "
            "parameter) pairs of that stage alone; form groups of parameters, not of pairs, by name, keep empty ones, "
            "and return None if it takes none"
        ) from failure
    if made is None:
        return None
    if not isinstance(made, Optimizer):
        raise RequestError(
            f"optimizer(...) returns {type(made).__name__} for {where}: return a torch.optim.Optimizer, or None if it "
            "takes none of the parameters"
        )
    given = {id(parameter) for _, parameter in named}
    stray = next((p for group in made.param_groups for p in group["params"] if id(p) not in given), None)
    if stray is not None:
        raise RequestError(
            f"optimizer(...) takes a parameter of shape {tuple(stray.shape)} that {where} does not have: it is called "
            "for each stage; use the (name, parameter) pairs that it is called with, not those of the model"
        )
    closure = inspect.signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise RequestError(
            f"{type(made).__name__} computes the loss again within its step(closure): a pipeline steps each stage's "
            "optimizer separately after the backward; use one whose step() needs no closure, such as torch.optim.AdamW"
        )
    return made


def join_optimizer(
    optimizer: Optimizer | None, make: OptimizerFactory, named: Sequence[tuple[str, nn.Parameter]], name: str
) -> None:
    """Add a parameter to the group of a stage's optimizer in which the user's function puts it.

    Args:
        optimizer: the stage's; None if it had no trained parameter.
        make: created it.
        named: the stage's parameters that are now trained.
        name: of the new one.

    Raises:
        RequestError: there is no optimizer, or the groups are others.
    """
    joining = dict(named)[name]
    if optimizer is not None and any(p is joining for group in optimizer.param_groups for p in group["params"]):
        return  # the user called add_param_group
    new = stage_optimizer(make, named)
    groups = [] if new is None else new.param_groups
    place = next((i for i, group in enumerate(groups) if any(p is joining for p in group["params"])), None)
    if place is None:
        return
    if optimizer is None or len(optimizer.param_groups) != len(groups):
        found = "none" if optimizer is None else f"one of {len(optimizer.param_groups)} parameter groups"
        raise RequestError(
            f"parameter '{name}' was unfrozen, and the optimizer of its stage, {found}, cannot take it: build the "
            "pipeline with all parameters that are ever trained unfrozen, and freeze them after that"
        )
    group = optimizer.param_groups[place]
    group["params"].append(joining)
    if "param_names" in group:
        group["param_names"].append(name)


def options_of(optimizer: Optimizer) -> list[dict[str, str]]:
    """The options of each parameter group, as strings."""
    return [
        {key: repr(value) for key, value in group.items() if key not in MEMBERS} for group in optimizer.param_groups
    ]


def check_groups(groups: Mapping[int, Sequence[Mapping[str, str]]]) -> None:
    """Refuse parameter groups that differ between stages: schedulers use their indices.

    Args:
        groups: stage → the options of each group, from `options_of`.

    Raises:
        RequestError: two stages have different groups.
    """
    if not groups:
        return
    first, wanted = next(iter(sorted(groups.items())))
    for stage, found in sorted(groups.items()):
        if list(found) != list(wanted):
            raise RequestError(
                f"scheduler= needs the same parameter groups in every stage: stage {first} has {_groups(wanted)} and "
                f"stage {stage} has {_groups(found)}; let optimizer(...) form the same ones in the same order and keep "
                "empty ones"
            )


def _groups(groups: Sequence[Mapping[str, str]]) -> str:
    return f"{len(groups)} (lr {', '.join(group.get('lr', 'none') for group in groups)})"


def stage_scheduler(make: SchedulerFactory, optimizer: Optimizer) -> LRScheduler:
    """The scheduler of a stage's optimizer.

    Args:
        make: the user's.
        optimizer: the stage's.

    Raises:
        RequestError: it fails, or returns a scheduler that cannot be stepped after each update.
    """
    try:
        made = make(optimizer)
    except Exception as failure:
        raise RequestError(
            f"scheduler(...) fails for an optimizer of {len(optimizer.param_groups)} parameter groups: "
            f"{in_a_line(failure)}: it is called with each stage's optimizer; return a scheduler of it"
        ) from failure
    if isinstance(made, ReduceLROnPlateau):
        raise RequestError(
            "ReduceLROnPlateau is stepped by a metric, and not after each update: create one for each of "
            "pipe.optimizers.values(), and step them all with the metric, which every rank has"
        )
    if not isinstance(made, LRScheduler):
        raise RequestError(
            f"scheduler(...) returns {type(made).__name__}: return a torch.optim.lr_scheduler.LRScheduler, or step "
            "your own over pipe.optimizers"
        )
    if getattr(made, "optimizer", optimizer) is not optimizer:
        raise RequestError(
            "scheduler(...) returns a scheduler of another optimizer than the one it is called with: create a new one "
            "for each stage's optimizer"
        )
    return made
