"""What all ranks give alike, compared: arguments, model and step before planning, batches where shapes are new.

A rank that was given something else would run a part of another model, or wait for messages that nobody sends it.
"""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from ..core.capture.operators import Operators
from ..core.capture.outputs import parts_in_words
from ..core.errors import RequestError
from .microbatches import Microbatch
from .team import Team

_SAMPLED = 32
"""Elements of each tensor that batches are compared by."""
_SPREAD = 2_654_435_761
"""How far they are apart, modulo the tensor's size: Knuth's multiplier for multiplicative hashing (The Art of Computer
Programming 3, section 6.4), so that they fall on no row or column of their own."""


def check_same(team: Team, given: Mapping[str, Any]) -> None:
    """Refuse ranks that were given different things. All processes call this at once.

    Args:
        team: the devices.
        given: what is compared, by the name that people know it by; values are compared as they are written.

    Raises:
        RequestError: on all ranks alike, with the first difference.
    """
    if _in_one_process(team):
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
                "every rank calls panpipe.pipeline with the same model and arguments; give all of them the same"
            )


def _text(name: str, given: Mapping[str, str]) -> str:
    return f"{name}={given[name]}" if name in given else f"no {name}"


def model_in_words(model: nn.Module, operators: Operators) -> dict[str, str]:
    """A model and its step, as ranks compare them.

    Args:
        model: the user's module.
        operators: the captured step.

    Returns:
        Its modules' modes, its parameters, what the step returns, and last the identity of the operator graph.
    """
    modes = {f"{name}.training" if name else "model.training": str(m.training) for name, m in model.named_modules()}
    parameters = {
        name: f"{'×'.join(map(str, p.shape)) or 'scalar'} {p.dtype}{'' if p.requires_grad else ', frozen'}"
        for name, p in model.named_parameters()
    }
    returned = parts_in_words(operators.step.outputs)
    return {**parameters, **modes, "a step that returns": returned, "operator graph": operators.graph.hash[:12]}


def check_same_batch(team: Team, pieces: Sequence[Microbatch]) -> None:
    """Refuse ranks of one pipeline that were given different batches. All of its processes call this at once.

    Shapes are compared, and of every tensor some elements, to three digits: what ranks compute for themselves may round
    differently.

    Args:
        team: the devices.
        pieces: the batch's microbatches.

    Raises:
        RequestError: on all ranks of the replica alike.
    """
    if len(team.local) == team.size:
        return
    what = [*map(_in_words, pieces[0].leaves)]
    shapes = f"a batch of {sum(piece.samples for piece in pieces)} samples, microbatches of ({', '.join(what)})"
    values = [_sampled(leaf) for leaf in pieces[0].leaves]
    found = team.in_replica(lambda _: (shapes, values))
    first = team.replica * team.size
    rule = "the ranks of a pipeline compute parts of one batch; give it to all of them, and shard data by replicas"
    for device, (their_shapes, theirs) in enumerate(found):
        ranks = team.rank(first + device), team.rank(first)
        if their_shapes != found[0][0]:
            raise RequestError(f"rank {ranks[0]} has {their_shapes} and rank {ranks[1]} {found[0][0]}: {rule}")
        for place, (one, other) in enumerate(zip(theirs, found[0][1], strict=True)):
            if not numpy.allclose(one, other, rtol=1e-3, atol=1e-5, equal_nan=True):
                name = _leaf_names(pieces[0])[place]
                raise RequestError(f"rank {ranks[0]} has other values in {name} than rank {ranks[1]}: {rule}")


def _leaf_names(piece: Microbatch) -> list[str]:
    return list(piece.shape.nesting.names)


def _in_words(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{'×'.join(map(str, leaf.shape)) or 'scalar'} {leaf.dtype}"
    return repr(leaf) if isinstance(leaf, int | float | str) else type(leaf).__name__


def _sampled(leaf: Any) -> list[float]:
    """Some elements of a tensor."""
    if not isinstance(leaf, Tensor) or leaf.is_meta or leaf.layout is not torch.strided or not leaf.numel():
        return []
    places = [i * _SPREAD % leaf.numel() for i in range(min(_SAMPLED, leaf.numel()))]
    values = leaf.detach()[torch.unravel_index(torch.tensor(places), leaf.shape)] if leaf.ndim else leaf.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    found: list[float] = values.double().flatten().tolist()
    return found


def _in_one_process(team: Team) -> bool:
    return len(team.local) == team.size and team.replicas == 1
