"""Whether an optimizer updates each parameter independently of the others, so that each stage may have its own.

This is tested: the optimizer steps small random parameters, those of all stages together and those of each stage alone.
"""

from collections.abc import Mapping, Sequence

import torch
from attrs import frozen
from torch import Tensor, nn

from ...core.errors import RequestError
from .optimizers import OptimizerFactory, options_of
from .trials import STEPS, TrialParameters, spread, trial_shapes

_TRIED = 8
"""Parameters of each stage with which an optimizer is tried."""
_SIZE = 3
"""Largest size of a dimension of them."""
_SAME = 1e-6
"""Largest relative difference in norm of two updates of a parameter, in float64, that counts as rounding; a factor that
depends on other parameters differs by more."""


def check_separable(make: OptimizerFactory, stages: Sequence[Mapping[str, nn.Parameter]]) -> None:
    """Refuse an optimizer whose update of a parameter depends on other parameters: each stage has its own optimizer.

    It is tried for a few steps on small random tensors, with all parameters together and stage by stage. Of torch's
    optimizers, which update each parameter independently or need a closure, the options of each parameter are compared,
    unless they have hooks. Optimizers that cannot be tried are accepted.

    Args:
        make: the user's.
        stages: the trained parameters of each stage, by name; on meta or not.

    Raises:
        RequestError: the updates differ.
    """
    tried = [{name: stage[name] for name in spread(list(stage), _TRIED)} for stage in stages if stage]
    if len(tried) < 2:
        return
    try:
        with torch.random.fork_rng([]):
            together = _trial(make, {name: p for stage in tried for name, p in stage.items()})
            if together is None:
                return
            alone = [_trial(make, stage) for stage in tried]
    except Exception:
        return  # the real optimizer will raise the error
    for found in alone:
        for name, options in found.options.items() if found is not None else ():
            if options != together.options[name]:
                raise RequestError(
                    f"optimizer(...) gives '{name}' other options with the parameters of all stages than with those of "
                    f"its stage alone ({_other_option(together.options[name], options)}): it is called for each stage; "
                    "choose groups and options by the names of parameters, not by their number or order"
                )
        for name, change in found.changes.items() if found is not None else ():
            if (change - together.changes[name]).norm() > _SAME * together.changes[name].norm():
                raise RequestError(
                    f"{together.kind} changes '{name}' differently with the parameters of all stages than with "
                    "those of its stage alone: a pipeline has an optimizer for each stage; use one that updates each "
                    "parameter independently, such as torch.optim.AdamW, or a plan of one stage"
                )


def _other_option(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    key = next(key for key in {**one, **other} if one.get(key) != other.get(key))
    return f"{key} {one.get(key)} and {other.get(key)}"


@frozen
class _Trial:
    """An optimizer that was tried.

    Args:
        kind: its name.
        options: name of a parameter → the options of its group.
        changes: name of a parameter → its update in `STEPS` steps; nothing for an optimizer of torch without hooks.
    """

    kind: str
    options: dict[str, dict[str, str]]
    changes: dict[str, Tensor]


def _trial(make: OptimizerFactory, like: Mapping[str, nn.Parameter]) -> _Trial | None:
    """Try an optimizer on random tensors; None if the user's function makes none."""
    trial = TrialParameters(trial_shapes(like, _SIZE))
    parameters = trial.parameters
    before = {name: p.detach().clone() for name, p in parameters.items()}
    made = make(list(parameters.items()))
    if made is None:
        return None
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    options = {
        name_of[id(p)]: own for group, own in zip(made.param_groups, options_of(made), strict=True)
        for p in group["params"] if id(p) in name_of
    }  # fmt: skip
    hooks = made._optimizer_step_pre_hooks or made._optimizer_step_post_hooks
    if type(made).__module__.startswith("torch.optim") and not hooks:
        return _Trial(type(made).__name__, options, {})
    for _ in range(STEPS):
        for name, parameter in parameters.items():
            parameter.grad = trial.draw(name)
        made.step()
    changes = {name: p.detach() - before[name] for name, p in parameters.items()}
    return _Trial(type(made).__name__, options, changes)
