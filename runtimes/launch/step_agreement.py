"""Checks before planning that all ranks captured the same step, operator by operator, with the user's line.

A step that takes another path on one rank, such as ``if rank == 0``, or reads another number there, has other operators
or constants on that rank. Stages of different steps would train a mixture. Replicas have the same operators, and may
have other numbers, which their batches may contain.
"""

from hashlib import sha256
from itertools import zip_longest

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ...core.capture.export.operators import Operators
from ...core.capture.values.user_lines import line_of
from ...core.errors import RequestError
from .agreement import in_one_process
from .team import Team

Called = tuple[str, tuple[str, ...]]
"""An operator, and its arguments other than tensors."""


def check_same_step(team: Team, operators: Operators) -> None:
    """Refuse ranks whose captured steps differ. All processes call this together, after `check_same`.

    Args:
        team: the devices.
        operators: of the captured step.

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
                    f"rank {team.rank(number)} {_text(theirs)} where rank {team.rank(first)} {_text(known)}: all ranks "
                    "of a pipeline must run the same step with the same numbers; take what depends on the rank out of "
                    "it, and print or log what pipe.step returns and pipe.metrics instead"
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


def _text(row: tuple[str, tuple[str, ...], str] | None) -> str:
    """What a rank runs, in words."""
    if row is None:
        return "ends its step"
    name, plain, line = row
    numbers = f"({', '.join(plain)})" if plain else ""
    return f"runs {name}{numbers}{f' at {line}' if line else ''}"
