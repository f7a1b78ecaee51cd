"""Optimizers and schedulers of stages, made by the user's functions.

A pipeline has an optimizer for each stage, made of the stage's parameters alone; together they are one optimizer of all
parameters, as long as it changes each of them for itself. Groups go by name, and are the same in every stage: a group
may be empty in one.
"""

import inspect
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ...core.errors import PanpipeError, RequestError, in_a_line

OptimizerFactory = Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer | None]
"""Makes an optimizer of (name, parameter) pairs: ``torch.optim.AdamW``, or a function that forms groups by name."""

SchedulerFactory = Callable[[Optimizer], LRScheduler]
"""Makes the scheduler of an optimizer: ``lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 1000)``."""

MEMBERS = ("params", "param_names")
"""What a parameter group has in addition to its options."""

_TRIED = 8
"""Parameters of each stage that an optimizer is tried with."""
_SAME = 1e-6
"""How far changes of a parameter may be apart, relative in norm, in float64: kernels that round otherwise count
as equal, and a factor that depends on other parameters is."""


def state_share(optimizer: OptimizerFactory | None) -> float:
    """Bytes of optimizer state for each byte of a parameter, measured with a small parameter.

    Args:
        optimizer: makes one; where it cannot make one for any parameter, Adam's share, 2.
    """
    if optimizer is None:
        return 0.0
    probe = nn.Parameter(torch.zeros(64, 64))
    try:
        held = [value for value in blank_state(optimizer, "probe", probe).values() if isinstance(value, Tensor)]
    except Exception:
        return 2.0
    # Counters of steps are no share of anything.
    return sum(value.nbytes for value in held if value.numel() >= 64) / probe.nbytes


def blank_state(make: OptimizerFactory, name: str, parameter: nn.Parameter) -> dict[str, Any]:
    """What an optimizer keeps of a parameter: as it is after a step with a gradient of zeros.

    Args:
        make: makes the optimizer; it is made of a copy of the parameter.
        name, parameter: whose state is asked for.
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
        named: the stage's parameters that are trained, at least one.

    Returns:
        None where the user's function takes none of them.

    Raises:
        RequestError: it fails, or makes what no stage can have.
    """
    where = f"the stage of '{named[0][0]}'"
    try:
        made = make(list(named))
    except PanpipeError:
        raise
    except Exception as failure:
        raise RequestError(
            f"optimizer(...) fails for {where}: {in_a_line(failure)}: it is called for each stage with the (name, "
            "parameter) pairs of that stage alone; form groups of parameters, not of pairs, by name, keep those that "
            "are empty, and return None where it takes none"
        ) from failure
    if made is None:
        return None
    if not isinstance(made, Optimizer):
        raise RequestError(
            f"optimizer(...) returns {type(made).__name__} for {where}: return a torch.optim.Optimizer, or None where "
            "it takes none of the parameters"
        )
    given = {id(parameter) for _, parameter in named}
    stray = next((p for group in made.param_groups for p in group["params"] if id(p) not in given), None)
    if stray is not None:
        raise RequestError(
            f"optimizer(...) takes a parameter of shape {tuple(stray.shape)} that {where} has not: it is called for "
            "each stage; use the (name, parameter) pairs that it is called with, not those of the model"
        )
    closure = inspect.signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise RequestError(
            f"{type(made).__name__} computes the loss again within its step(closure): a pipeline steps each stage's "
            "optimizer for itself when the backward is through; use one whose step() needs no closure, such as "
            "torch.optim.AdamW"
        )
    return made


def join_optimizer(
    optimizer: Optimizer | None, make: OptimizerFactory, named: Sequence[tuple[str, nn.Parameter]], name: str
) -> None:
    """Add a parameter to the group of a stage's optimizer in which the user's function puts it.

    Args:
        optimizer: the stage's; None where it had no parameter.
        make: made it.
        named: the stage's parameters that are trained now.
        name: of the new one.

    Raises:
        RequestError: there is no optimizer, or other groups.
    """
    joining = dict(named)[name]
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


def check_separable(make: OptimizerFactory, stages: Sequence[Mapping[str, nn.Parameter]]) -> None:
    """Refuse an optimizer whose change of a parameter depends on the others that it has: stages have their own.

    It is tried on a few steps of small stand-ins, all of them at once and stage by stage. Optimizers that cannot be
    tried, and those of torch, which change each parameter for itself or need a closure, are let through.

    Args:
        make: the user's.
        stages: of each the parameters that are trained, by name; on meta or not.

    Raises:
        RequestError: it changes them otherwise.
    """
    tried = [_some(stage) for stage in stages if stage]
    if len(tried) < 2:
        return
    try:
        with torch.random.fork_rng([]):
            together = _changes(make, {name: p for stage in tried for name, p in stage.items()})
            if together is None:
                return
            alone = [_changes(make, stage) for stage in tried]
    except Exception:
        return  # the real one raises what is wrong
    kind, changes = together
    for found in alone:
        for name, change in found[1].items() if found is not None else ():
            if (change - changes[name]).norm() > _SAME * changes[name].norm():
                raise RequestError(
                    f"{kind} changes '{name}' otherwise with the parameters of all stages at hand than with its own "
                    "stage's alone: a pipeline has an optimizer for each stage; use one that changes each parameter "
                    "for itself, such as torch.optim.AdamW, or a plan of one stage"
                )


def _some(stage: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Up to `_TRIED` parameters, from all over the stage."""
    apart = -(-len(stage) // _TRIED)
    return {name: p for i, (name, p) in enumerate(stage.items()) if i % apart == 0}


def _changes(make: OptimizerFactory, like: Mapping[str, nn.Parameter]) -> tuple[str, dict[str, Tensor]] | None:
    """The optimizer's name, and how far it moves stand-ins in three steps; None for one of torch's, or none."""
    standing: dict[str, nn.Parameter] = {}
    generators: dict[str, torch.Generator] = {}

    def drawn(name: str) -> Tensor:
        shape, dtype = [min(size, 3) for size in like[name].shape], like[name].dtype
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(shape, dtype=wide, generator=generators[name])

    for name in like:
        generators[name] = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        standing[name] = nn.Parameter(drawn(name))
    before = {name: p.detach().clone() for name, p in standing.items()}
    made = make(list(standing.items()))
    if made is None or type(made).__module__.startswith("torch.optim"):
        return None
    for _ in range(3):
        for name, parameter in standing.items():
            parameter.grad = drawn(name)
        made.step()
    return type(made).__name__, {name: p.detach() - before[name] for name, p in standing.items()}


def options_of(optimizer: Optimizer) -> list[dict[str, str]]:
    """The options of each parameter group, as texts."""
    return [
        {key: repr(value) for key, value in group.items() if key not in MEMBERS} for group in optimizer.param_groups
    ]


def check_groups(groups: Mapping[int, Sequence[Mapping[str, str]]]) -> None:
    """Refuse parameter groups that are not the same in every stage, for schedulers that go by their number.

    Args:
        groups: stage → the options of each group, as `options_of` has them.

    Raises:
        RequestError: two stages have other ones.
    """
    if not groups:
        return
    first, wanted = next(iter(sorted(groups.items())))
    for stage, found in sorted(groups.items()):
        if list(found) != list(wanted):
            raise RequestError(
                f"scheduler= needs the same parameter groups in every stage: stage {first} has {_groups(wanted)} and "
                f"stage {stage} has {_groups(found)}; let optimizer(...) form the same ones in the same order and keep "
                "those that are empty"
            )


def _groups(groups: Sequence[Mapping[str, str]]) -> str:
    return f"{len(groups)} (lr {', '.join(group.get('lr', 'none') for group in groups)})"


def stage_scheduler(make: SchedulerFactory, optimizer: Optimizer) -> LRScheduler:
    """The scheduler of a stage's optimizer.

    Args:
        make: the user's.
        optimizer: the stage's.

    Raises:
        RequestError: it fails, or makes what cannot be stepped once an update.
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
            "ReduceLROnPlateau is stepped by a metric, and not once an update: make one for each of "
            "pipe.optimizers.values(), and step them all with the metric, which every rank has"
        )
    if not isinstance(made, LRScheduler):
        raise RequestError(
            f"scheduler(...) returns {type(made).__name__}: return a torch.optim.lr_scheduler.LRScheduler, or step "
            "your own over pipe.optimizers"
        )
    if getattr(made, "optimizer", optimizer) is not optimizer:
        raise RequestError(
            "scheduler(...) returns a scheduler of another optimizer than the one it is called with: make a new one "
            "for each stage's optimizer"
        )
    return made
