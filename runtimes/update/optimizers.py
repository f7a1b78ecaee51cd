"""Optimizers and schedulers of stages, created by the user's functions.

A pipeline has an optimizer for each stage, created with the stage's parameters alone. Together they equal one optimizer
of all parameters, if it updates each parameter independently. Groups are formed by name and are the same in every
stage; a group may be empty in a stage.

The stages' optimizers follow the groups of an optimizer over the whole model, as users and frameworks create it::

    given optimizer ──▶ its class, groups, options and state ──▶ an optimizer for each stage
                    ──▶ options, such as learning rates that its schedulers write ── before each step ──▶ the same
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
        {key: text_of(value) for key, value in group.items() if key not in MEMBERS} for group in optimizer.param_groups
    ]


def text_of(value: Any) -> str:
    """A value as a string that is equal in every process: functions, such as a scheduler's own formula, by their
    type alone."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {text_of(held)}' for key, held in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(text_of, value))}]"
    if isinstance(value, Tensor):
        return repr(value.tolist())
    plain = value is None or isinstance(value, bool | int | float | complex | str)
    return repr(value) if plain else type(value).__name__


def check_groups(groups: Mapping[int, Sequence[Mapping[str, str]]]) -> None:
    """Refuse parameter groups that differ between stages: schedulers use their indices.

    Raises:
        RequestError: two stages have different groups.
    """
    if not groups:
        return
    first, wanted = min(groups.items())

    def text(groups: Sequence[Mapping[str, str]]) -> str:
        return f"{len(groups)} (lr {', '.join(group.get('lr', 'none') for group in groups)})"

    for stage, found in sorted(groups.items()):
        if list(found) != list(wanted):
            raise RequestError(
                f"scheduler= needs the same parameter groups in every stage: stage {first} has {text(wanted)} and "
                f"stage {stage} has {text(found)}; let optimizer(...) form the same ones in the same order and keep "
                "empty ones"
            )


def stage_scheduler(make: SchedulerFactory, optimizer: Optimizer) -> LRScheduler:
    """The scheduler of a stage's optimizer.

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


_READ = ("param_groups", "state", "defaults")
"""What an optimizer is created from."""


class GivenOptimizer:
    """Creates the stages' optimizers from an optimizer over a model: the same class, groups, options and state.

    Raises:
        RequestError: it takes a parameter that the model does not have, or has state of parameters that are DTensors;
            or its class, groups and options do not create an equal one.
    """

    def __init__(self, given: Optimizer, model: nn.Module) -> None:
        from torch.distributed.tensor import DTensor

        self._given, self._model, self._kind = given, model, type(given)
        self._name_of = {id(parameter): name for name, parameter in model.named_parameters()}
        parameters = [p for group in given.param_groups for p in group["params"]]
        stray = next((p for p in parameters if id(p) not in self._name_of), None)
        if stray is not None:
            raise RequestError(
                f"{self._kind.__name__} takes a parameter of shape {tuple(stray.shape)} that the model does not have: "
                "create it with the model's own parameters"
            )
        if given.state and any(isinstance(p, DTensor) for p in parameters):
            raise RequestError(
                f"{self._kind.__name__} has stepped, and its parameters are DTensors: give a new optimizer, and resume "
                "its state by pipe.resume(folder)"
            )
        self._names = frozenset(self._name_of.values())
        self._groups = len(given.param_groups)
        self._group_of = {
            self._name_of[id(p)]: i for i, group in enumerate(given.param_groups) for p in group["params"]
        }
        self._check()

    def _check(self) -> None:
        """Refuse an optimizer that its class, groups and options do not create again."""
        try:
            again = self._created([{**group, "params": [nn.Parameter(Tensor(1))]} for group in self._options()])
            held = {key: value for key, value in vars(self._given).items() if key not in _READ}
            other = [key for key, value in held.items() if _differs(again, key, value)]
        except Exception:
            other = ["its arguments"]
        if other:
            kind, values = self._kind.__name__, ", ".join(f"{k}={value!r}" for k, value in self._given.defaults.items())
            raise RequestError(
                f"optimizer is an object of {kind}, and {other[0]} cannot be read from its groups, as each stage's own "
                f"optimizer needs it: give a function, optimizer=lambda p: {kind}(p, {values})"
            )

    def __call__(self, named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer | None:
        """The optimizer of a stage with these parameters; None if the given one takes none of them."""
        taken = [(name, p) for name, p in named if name in self._group_of or name not in self._names]
        if not taken:
            return None
        groups = self._options()
        for group in groups:
            group["params"] = []
        for name, parameter in taken:  # a name that the model does not have is from a trial build with other tensors
            groups[self._group_of.get(name, 0)]["params"].append(parameter)
        made = self._created(groups)
        states = {self._name_of.get(id(p)): state for p, state in self._given.state.items()}
        for name, parameter in taken:
            if name in states:
                made.state[parameter] = {k: _copied(value, parameter) for k, value in states[name].items()}
        return made

    def _created(self, groups: list[dict[str, Any]]) -> Optimizer:
        accepted = inspect.signature(self._kind).parameters
        return self._kind(groups, **{key: value for key, value in self._given.defaults.items() if key in accepted})

    def _options(self) -> list[dict[str, Any]]:
        """The options of each group."""
        groups = self._given.param_groups
        if len(groups) != self._groups:
            raise RequestError(
                f"{self._kind.__name__} has {len(groups)} groups, and {self._groups} when the pipeline was built: "
                "build another pipeline, or put all parameters into groups before, also those that are frozen"
            )
        return [{key: value for key, value in group.items() if key not in MEMBERS} for group in groups]

    @property
    def learning_rates(self) -> list[float]:
        """The learning rate of each group."""
        return [float(group["lr"]) for group in self._given.param_groups if "lr" in group]

    def copy_options(self, optimizers: Iterable[Optimizer]) -> None:
        """Copy the options of the groups, such as learning rates, to the optimizers of stages."""
        options = self._options()
        for optimizer in optimizers:
            for group, values in zip(optimizer.param_groups, options, strict=True):
                group.update(values)
        self._given._opt_called = True  # type: ignore[attr-defined] # its schedulers read it

    def take_options(self, optimizers: Sequence[Optimizer]) -> None:
        """Take the options of the groups from the optimizers of stages, which a checkpoint has set."""
        for optimizer in optimizers[:1]:
            for group, values in zip(self._given.param_groups, optimizer.param_groups, strict=True):
                group.update({key: value for key, value in values.items() if key not in MEMBERS})

    def follow_model(self) -> None:
        """Refer to the parameters that the model has now, and hold no state: the stages have it.

        Parameters of other processes are freed.
        """
        own = dict(self._model.named_parameters())
        groups: list[list[nn.Parameter]] = [[] for _ in self._given.param_groups]
        for name, index in self._group_of.items():
            groups[index].append(own[name])
        for group, parameters in zip(self._given.param_groups, groups, strict=True):
            group["params"] = parameters
        self._given.state.clear()

    def refuse_other_use(self) -> None:
        """From now on refuse to step the given optimizer, to save its state and to load it: the stages have it."""
        self._given.register_step_pre_hook(_refuse_step)
        self._given.register_state_dict_pre_hook(_refuse_state)
        self._given.register_load_state_dict_pre_hook(_refuse_state)


def _copied(value: Any, parameter: nn.Parameter) -> Any:
    """A part of a parameter's state; counters stay on their device."""
    if not isinstance(value, Tensor):
        return value
    return value.to(parameter.device, copy=True) if value.shape == parameter.shape else value.clone()


def _differs(again: Optimizer, key: str, value: Any) -> bool:
    """Whether an attribute is a plain value or a collection, and another one or missing in an equal optimizer."""
    if key.startswith(("_optimizer_", "_zero_grad", "_opt_", "_patched")) or not isinstance(
        value, int | float | str | tuple | list | dict | set | None
    ):
        return False
    return not hasattr(again, key) or getattr(again, key) != value


def _refuse_state(optimizer: Optimizer, *_: Any) -> None:
    raise RequestError(
        f"{type(optimizer).__name__} has no state, which the pipeline's stages have: write and read it by "
        "pipe.checkpoint(folder) and pipe.resume(folder), or pipe.state_dict()"
    )


def _refuse_step(optimizer: Optimizer, *_: Any) -> None:
    raise RequestError(
        f"{type(optimizer).__name__}.step() would update a second time: pipe.step(batch) has updated already; leave "
        "optimizer.step() out"
    )
