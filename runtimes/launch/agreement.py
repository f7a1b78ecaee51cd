"""Checks before planning that all ranks have the same arguments and model, and captured the same step.

A rank with other ones would run a part of another model, or wait for messages that are never sent. (Batches are
compared in `batch_agreement`.) Steps are compared operator by operator, and the error has the user's line: a step that
takes another path on one rank, such as ``if rank == 0``, or reads another number there, has other operators or
constants on that rank. Stages of different steps would train a mixture. Replicas have the same operators, and may have
other numbers, which their batches may contain.
"""

from collections.abc import Mapping
from hashlib import sha256
from itertools import zip_longest
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ...core.capture.export.operators import Operators
from ...core.capture.graph.outputs import parts_in_words
from ...core.capture.values.user_lines import line_of
from ...core.errors import RequestError
from ...core.wording import shape_text
from .team import Team


def check_same(team: Team, given: Mapping[str, Any]) -> None:
    """Refuse ranks with different arguments. All processes call this together.

    Args:
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


Called = tuple[str, tuple[str, ...]]
"""An operator, and its arguments other than tensors."""


def check_same_step(team: Team, operators: Operators) -> None:
    """Refuse ranks whose captured steps differ. All processes call this together, after `check_same`.

    Raises:
        RequestError: on all ranks, with the first operator that differs and its lines.
    """
    if in_one_process(team):
        return
    calls = [node for node in operators.step.graph.nodes if node.op == "call_function"]
    mine = [_called(node) for node in calls]
    same = (operators.graph.hash, [name for name, _ in mine]), mine
    identities = team.everywhere(lambda _: [sha256(repr(part).encode()).hexdigest() for part in same])
    others = [
        (number, first, part)
        for number, identity in enumerate(identities)
        for part, first in enumerate((0, number - number % team.size))
        if identity[part] != identities[first][part]
    ]
    if not others:
        return
    found = team.everywhere(lambda _: [(*called, line_of(node)) for called, node in zip(mine, calls, strict=True)])
    for number, first, part in others:
        for theirs, known in zip_longest(found[number], found[first]):
            if theirs is None or known is None or theirs[: part + 1] != known[: part + 1]:
                raise RequestError(
                    f"rank {team.rank(number)} {_in_words(theirs)} where rank {team.rank(first)} {_in_words(known)}: "
                    "all ranks of a pipeline must run the same step with the same numbers; take what depends on the "
                    "rank out of it, and print or log what pipe.step returns and pipe.metrics instead"
                )
    raise RequestError(
        "ranks captured steps with the same operators for tensors of other shapes or parameters: every rank must call "
        "panpipe.pipeline with the same model, step and example batch"
    )


def _called(node: fx.Node) -> Called:
    """An operator of torch with its numbers; of others the name alone, because theirs may differ between processes."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        return getattr(node.target, "__name__", "a function"), ()
    plain = (leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if not isinstance(leaf, fx.Node))
    return str(node.target), tuple(map(repr, plain))


def _in_words(row: tuple[str, tuple[str, ...], str] | None) -> str:
    """What a rank runs, in words."""
    if row is None:
        return "ends its step"
    name, plain, line = row
    numbers = f"({', '.join(plain)})" if plain else ""
    return f"runs {name}{numbers}{f' at {line}' if line else ''}"
