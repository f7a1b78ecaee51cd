"""Checks before planning that all ranks have the same arguments and model.

See `step_agreement` for the step, and `batch_agreement` for batches.

A rank with other ones would run a part of another model, or wait for messages that are never sent.
"""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from torch import nn

from ...core.capture.export.operators import Operators
from ...core.capture.graph.outputs import parts_in_words
from ...core.errors import RequestError
from ...core.wording import shape_text
from .team import Team


def check_same(team: Team, given: Mapping[str, Any]) -> None:
    """Refuse ranks with different arguments. All processes call this together.

    Args:
        team: the devices.
        given: the values to compare, by their names in messages; they are compared as strings.

    Raises:
        RequestError: on all ranks, with the first difference.
    """
    if in_one_process(team):
        return
    mine = {name: str(value) for name, value in given.items()}
    digest = sha256(repr(mine).encode()).hexdigest()
    if len(set(team.everywhere(lambda _: digest))) == 1:
        return
    found = team.everywhere(lambda _: mine)
    first = found[0]
    for number, other in enumerate(found):
        name = next((name for name in (*first, *other) if first.get(name) != other.get(name)), None)
        if name is not None:
            raise RequestError(
                f"rank {team.rank(number)} has {_text(name, other)} and rank {team.rank(0)} has {_text(name, first)}: "
                "every rank must call panpipe.pipeline with the same model and arguments; give all of them the same"
            )


def _text(name: str, given: Mapping[str, str]) -> str:
    return f"{name}={given[name]}" if name in given else f"no {name}"


def model_in_words(model: nn.Module, operators: Operators) -> dict[str, str]:
    """A model and its step as strings, for `check_same`.

    Args:
        model: the user's module.
        operators: the captured step.

    Returns:
        Its modules' modes, its parameters, and last what the step returns.
    """
    modes = {f"{name}.training" if name else "model.training": str(m.training) for name, m in model.named_modules()}
    parameters = {
        name: f"{shape_text(p.shape)} {p.dtype}{'' if p.requires_grad else ', frozen'}"
        for name, p in model.named_parameters()
    }
    returned = parts_in_words(operators.step.outputs)
    return {**parameters, **modes, "a step that returns": returned}


def in_one_process(team: Team) -> bool:
    """Whether all devices of all replicas are in this process, so that there is nothing to compare."""
    return len(team.local) == team.size and team.replicas == 1
